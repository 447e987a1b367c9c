"""What only runtime jax has: one compilation, state in parts on the devices, programs kept."""

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import chips
import pytest
from driver_process import DriverProcess

from runtimes.process.job import TrainJob

chips.importorskip("jax")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("jax")]  # they share a process
MakeJob = Callable[..., TrainJob]
COMMON: dict[str, Any] = {
    "runtime": "jax",
    "global_batch_size": 8,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 5,
    "ema_decay": 0.9,
    "logging_steps": 5,
}


@pytest.fixture
def make_job(make_job: MakeJob) -> MakeJob:
    """The programs are kept from one session of tests to the next."""
    kept = f"{os.environ['JAX_COMPILATION_CACHE_DIR']}-of-jobs"
    return lambda **settings: replace(make_job(**{**COMMON, **settings}), compiled=kept)


def test_a_step_is_compiled_once_a_shape_and_a_resume_reads_the_programs(
    driver: DriverProcess, make_job: MakeJob
) -> None:
    """With a learning rate that changes, an average, checkpoints and metrics; the state lies in
    parts, a quarter of nearly all of it on each device."""
    job = make_job(steps=20, checkpointing_steps=5, checkpoints_total_limit=9, fsdp=4)
    found = driver.call("train", asdict(job), 10)
    assert found["began"] == [0, 10]
    for counted, shapes, steps in zip(found["by_step"], found["shapes"], (20, 10), strict=True):
        assert len(counted) == steps
        # A resumed run asks for a program once more, and finds it.
        assert counted == [int(shape not in shapes[:n]) for n, shape in enumerate(shapes)]
    assert len(set(found["shapes"][0])) == 2
    assert found["hits"][1] >= len(set(found["shapes"][1]))
    assert found["kept in"] == f"{job.compiled}/jax-{version('jaxlib')}"
    assert list(Path(found["kept in"]).iterdir())
    assert found["left"][1] == found["left"][0]
    assert len(found["bytes"]) == 4
    assert max(found["bytes"].values()) <= 1.05 * found["whole"] / 4


def test_micro_batches_that_devices_cannot_share_are_filled_up(
    driver: DriverProcess, make_job: MakeJob, write_latents: Callable[..., str], tmp_path: Path
) -> None:
    """Five pictures in threes, on four devices: one program, the last micro-batch included."""
    latents = write_latents(tmp_path / "one", [{"train/8x8": 9}])
    settings = {"global_batch_size": 5, "micro_batch_size": 3, "fsdp": 2}
    job = make_job(steps=3, **settings, latents=latents)
    found = driver.call("train", asdict(job))
    assert found["by_step"] == [[1, 0, 0]]
    assert max(found["bytes"].values()) <= 1.05 * found["whole"] / 2
