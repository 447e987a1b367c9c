"""What the tests of runs on two hosts share; their fixtures are in flows/conftest.py."""

import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import published as checks
from kiln_command import ROOT, command
from waiting import wait_until

Overrides = dict[str, Any]
Run = Callable[..., Path]
SECONDS = 240  # for a busy machine
WEIGHTS = "unet/diffusion_pytorch_model.safetensors"
#: Long enough for a host to fail between two checkpoints.
LONGER: Overrides = {"train.steps": 24, "train.checkpointing_steps": 4}


def checkpoints(store: Path) -> list[int]:
    """Steps of the checkpoints of a store's only training."""
    found = store.glob("train/*/checkpoints/step-*/manifest.json")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


def weights_of(report: checks.Report) -> bytes:
    """The weights that a run has trained."""
    return (checks.folder(report, "train") / WEIGHTS).read_bytes()


def cancel_in_training(overrides: Overrides, variables: Mapping[str, str], log: Path) -> float:
    """Run `kiln run digits`, and send SIGTERM once it trains; the seconds until it has ended."""
    with log.open("wb") as out:
        flow = subprocess.Popen(
            command("run", "digits", overrides=overrides),
            env=variables,
            cwd=ROOT,
            stdout=out,
            stderr=out,
        )
    wait_until(
        lambda: " loss " in log.read_text(),
        SECONDS,
        alive=lambda: flow.poll() is None,
        says=log.read_text,
    )
    begun = time.monotonic()
    flow.send_signal(signal.SIGTERM)
    flow.wait(SECONDS)
    return time.monotonic() - begun
