"""What only runtime jax has: one compilation, state in parts on the devices, programs kept.

JAX takes its number of virtual devices when it starts: each test runs a driver in a process.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import chips
import pytest

from runtimes.job import TrainJob, write_job

pytest.importorskip("jax")
pytestmark = pytest.mark.slow
DRIVER = Path(__file__).with_name("driver.py")
MakeJob = Callable[..., TrainJob]
COMMON: dict[str, Any] = {
    "global_batch_size": 8,
    "lr_schedule": "cosine",
    "warmup_steps": 5,
    "ema_decay": 0.9,
    "log_every": 5,
    "device": "cpu",
}


def drive(job: TrainJob, folder: Path, *arguments: str) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    write_job(job, folder / "job.json")
    command = [sys.executable, str(DRIVER), str(folder / "job.json"), *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=1800,
        env={**os.environ, **chips.ENVIRONMENT["jax"]},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_fifty_steps_are_compiled_once_and_a_resume_reads_the_program(
    make_job: MakeJob, tmp_path: Path
) -> None:
    """With a learning rate that changes, an average, checkpoints and metrics; the state lies in
    parts, a quarter of nearly all of it on each device."""
    kept = tmp_path / "compiled"
    settings = {**COMMON, "steps": 50, "checkpoint_every": 10, "keep_checkpoints": 9}
    made = make_job(**settings, mesh={"fsdp": 4})
    job = replace(made, runtime="jax", compiled=str(kept))
    found = drive(job, tmp_path / "run", "30")
    for counted, shapes, steps in zip(found["by_step"], found["shapes"], (50, 20), strict=True):
        assert len(counted) == steps
        # A resumed run asks for a program once more, and finds it.
        assert counted == [int(shape not in shapes[:n]) for n, shape in enumerate(shapes)]
    assert found["hits"] >= len(set(found["shapes"][1])) and list(kept.glob("*/*"))
    assert len(found["bytes"]) == 4
    assert max(found["bytes"].values()) <= 1.05 * found["whole"] / 4


def test_micro_batches_that_devices_cannot_share_are_filled_up(
    make_job: MakeJob, tmp_path: Path
) -> None:
    """Eight pictures in threes, on four devices: one program, the last micro-batch included."""
    made = make_job(**{**COMMON, "steps": 3, "micro_batch_size": 3}, mesh={"fsdp": 2})
    found = drive(replace(made, runtime="jax"), tmp_path / "run")
    assert sum(found["by_step"][0]) == len(set(found["shapes"][0]))
    assert max(found["bytes"].values()) <= 1.05 * found["whole"] / 2
