"""diffusers' example scripts, unmodified, in an environment of their own."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOOKS = Path(__file__).with_name("peer_hooks.py")
NEVER = 10**9
LAST_WORDS = 2000  # characters


#: By family and method. `train_text_to_image_sdxl.py` has latents and text embeddings precomputed,
#: the others encode in every step.
SCRIPTS = {
    ("sdxl", "full"): "train_text_to_image_sdxl.py",
    ("sdxl", "lora"): "train_text_to_image_lora_sdxl.py",
    ("sd", "full"): "train_text_to_image.py",
    ("sd", "lora"): "train_text_to_image_lora.py",
}


class PeerFailed(RuntimeError):
    """The script ended with an error; the message has its last words."""


@dataclass(frozen=True)
class PeerTime:
    """Mean seconds of the script's steps after the warm-up."""

    fetch: float  # reading, decoding and collating a batch, in the loop as the script has it
    encode: float  # in the VAE and the text encoders, where it encodes in the step
    body: float  # everything but the fetching

    @property
    def iteration(self) -> float:
        """The whole step, as its progress bar counts it."""
        return self.fetch + self.body

    @property
    def precomputed(self) -> float:
        """The step less what it spends encoding: as if latents and text embeddings were there."""
        return self.iteration - self.encode

    @property
    def training(self) -> float:
        """What is left once the batch is there, too."""
        return self.body - self.encode

    @classmethod
    def from_steps(cls, steps: Sequence[Mapping[str, float]], warm_up: int) -> PeerTime:
        """From what peer_hooks.py noted of every step but the last."""
        kept = steps[warm_up:]
        means = {name: statistics.fmean(step[name] for step in kept) for name in kept[0]}
        return cls(**means)


@dataclass(frozen=True)
class Ended:
    """A run of a script that ended well."""

    seconds: float  # from the process's start to its end
    steps: list[dict[str, float]]  # as peer_hooks.py noted them
    memory_bytes: int  # most that was in use, on the device or in the process


@dataclass(frozen=True)
class Peer:
    """Where the scripts are, and what runs them."""

    examples: Path
    python: str

    def missing(self, script: str) -> str:
        """Why a script cannot be run; nothing if it can."""
        path = self.examples / script
        return "" if path.is_file() else f"{path} is not there"

    def run(
        self,
        script: str,
        model: Path,
        images: Path,
        scratch: Path,
        *,
        record: Path | None = None,
        **options: Any,
    ) -> Ended:
        """Run a script to its end.

        Args:
            scratch: an empty folder: nothing that an earlier run has cached is reused.
            options: the script's command-line options; True is an option without a value.

        Raises:
            PeerFailed: it did not end well.
        """
        notes = scratch / "notes.json"
        given = {
            "pretrained_model_name_or_path": model,
            "train_data_dir": images,
            "cache_dir": scratch / "cache",
            "output_dir": scratch / "out",
            "checkpointing_steps": NEVER,
            "lr_warmup_steps": 0,
            "seed": 0,
            **options,
        }
        path = self.examples / script
        command = [self.python, str(HOOKS), str(notes), str(record or "-"), str(path)]
        for name, value in given.items():
            command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        begin = time.perf_counter()
        done = subprocess.run(
            command, env=_environment(scratch), capture_output=True, text=True, errors="replace"
        )
        seconds = time.perf_counter() - begin
        if done.returncode:
            raise PeerFailed(f"{script} exited with {done.returncode}: {_last_words(done)}")
        return Ended(seconds, **json.loads(notes.read_text(encoding="utf-8")))

    def versions(self) -> dict[str, str]:
        """Versions of the packages that the scripts import."""
        names = ("torch", "torchvision", "diffusers", "transformers", "accelerate", "datasets")
        code = f"import json, importlib.metadata as m; found = {{n: m.version(n) for n in {names}}}"
        command = [self.python, "-c", f"{code}; print(json.dumps(found))"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise PeerFailed(_last_words(done))
        return dict(json.loads(done.stdout))


def _environment(scratch: Path) -> dict[str, str]:
    """Ours, offline, with nothing cached and with the threads waiting as is the default."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(scratch / "home"),
        "WANDB_MODE": "disabled",
    }
    environment.pop("OMP_WAIT_POLICY", None)
    environment.pop("PYTHONPATH", None)
    return environment


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr or done.stdout).strip()[-LAST_WORDS:]
