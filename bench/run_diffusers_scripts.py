"""Run diffusers' unmodified example scripts in an environment of their own."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import Failed

HOOKS = Path(__file__).with_name("diffusers_script_hooks.py")
NEVER = 10**9
ERROR_CHARACTERS = 2000
#: Script by family and method. `train_text_to_image_sdxl.py` precomputes latents and text
#: embeddings; the others encode in every step.
SCRIPTS = {
    ("sdxl", "full"): "train_text_to_image_sdxl.py",
    ("sdxl", "lora"): "train_text_to_image_lora_sdxl.py",
    ("sd", "full"): "train_text_to_image.py",
    ("sd", "lora"): "train_text_to_image_lora.py",
}


def add_peer_options(parser: argparse.ArgumentParser, rows: Iterable[str]) -> None:
    """Add `--only`, and `--diffusers-examples` and `--peer-python`, which `find_peer` reads."""
    parser.add_argument("--only", nargs="+", choices=list(rows), metavar="ROW", help="default: all")
    parser.add_argument(
        "--diffusers-examples",
        type=Path,
        metavar="FOLDER",
        help="folder with train_text_to_image_sdxl.py and train_text_to_image_lora_sdxl.py; "
        "without it, rows that require them are skipped",
    )
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        metavar="PYTHON",
        help="Python interpreter for these scripts (default: this one)",
    )


def find_peer(options: argparse.Namespace, facts: dict[str, Any]) -> Peer | None:
    """The peer of the options, its versions added to `facts`; None without scripts.

    Raises:
        Failed: the peer's interpreter or a package is missing.
    """
    if options.diffusers_examples is None:
        return None
    peer = Peer(options.diffusers_examples.resolve(), options.peer_python)
    try:
        facts["peer_versions"] = peer.versions()
    except (OSError, Failed) as error:
        raise Failed(f"--peer-python {options.peer_python}: {error}") from None
    return peer


@dataclass(frozen=True)
class PeerTime:
    """Mean seconds per step of a script, after the warm-up."""

    fetch: float  # reading, decoding and collating a batch
    encode: float  # in the VAE and the text encoders
    body: float  # all except fetch; includes encode

    @property
    def iteration(self) -> float:
        """The whole step, as the script's progress bar shows it."""
        return self.fetch + self.body

    @property
    def precomputed(self) -> float:
        """The step without encoding, as with precomputed latents and text embeddings."""
        return self.iteration - self.encode

    @property
    def training(self) -> float:
        """The step without fetching and encoding."""
        return self.body - self.encode

    @classmethod
    def from_steps(cls, steps: Sequence[Mapping[str, float]], warm_up: int) -> PeerTime:
        """From the steps that diffusers_script_hooks.py timed: all except the last."""
        kept = steps[warm_up:]
        means = {name: statistics.fmean(step[name] for step in kept) for name in kept[0]}
        return cls(**means)


@dataclass(frozen=True)
class ScriptRun:
    """A successful run of a script."""

    seconds: float  # from start to end of the process
    steps: list[dict[str, float]]  # from diffusers_script_hooks.py
    memory_bytes: int  # peak of the device, or of the process on a CPU
    precomputing: tuple[float, float]  # seconds and CPU seconds of datasets' `map`


@dataclass(frozen=True)
class Peer:
    """The scripts, and the Python interpreter that runs them."""

    examples: Path
    python: str

    def missing(self, script: str) -> str:
        """Why a script cannot run; empty if it can."""
        path = self.examples / script
        return "" if path.is_file() else f"{path}: not found"

    def run(
        self,
        script: str,
        model: Path,
        images: Path,
        scratch: Path,
        *,
        record: Path | None = None,
        vae_seconds: float | None = None,
        **options: Any,
    ) -> ScriptRun:
        """Run a script.

        Args:
            scratch: an empty folder for its caches and output, so that each run starts cold.
            record: folder for the arrays of each step; None: not recorded.
            vae_seconds: per batch of a stand-in for the VAE that needs no processor; None: the VAE.
            options: command-line options of the script; True for a flag.

        Raises:
            Failed: its exit code is not 0.
        """
        notes = scratch / "notes.json"
        arguments = {
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
        for name, value in arguments.items():
            command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        begin = time.perf_counter()
        done = subprocess.run(
            command,
            env=_environment(scratch, vae_seconds),
            capture_output=True,
            text=True,
            errors="replace",
        )
        seconds = time.perf_counter() - begin
        if done.returncode:
            raise Failed(f"{script} exited with {done.returncode}: {_error(done)}")
        return ScriptRun(seconds, **json.loads(notes.read_text(encoding="utf-8")))

    def versions(self) -> dict[str, str]:
        """Versions of the packages that the scripts import."""
        names = ("torch", "torchvision", "diffusers", "transformers", "accelerate", "datasets")
        code = f"import json, importlib.metadata as m; v = {{n: m.version(n) for n in {names}}}"
        command = [self.python, "-c", f"{code}; print(json.dumps(v))"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Failed(_error(done))
        return dict(json.loads(done.stdout))


def _environment(scratch: Path, vae_seconds: float | None) -> dict[str, str]:
    """Our environment, but offline, with empty caches and the default OpenMP wait policy."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(scratch / "home"),
        "WANDB_MODE": "disabled",
    }
    environment.pop("OMP_WAIT_POLICY", None)
    environment.pop("PYTHONPATH", None)
    if vae_seconds is not None:
        environment["KILN_BENCH_VAE_SECONDS"] = str(vae_seconds)
    return environment


def _error(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr or done.stdout).strip()[-ERROR_CHARACTERS:]
