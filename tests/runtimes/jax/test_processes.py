"""How the processes of a run part, without a model."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import chips
import pytest
from jobs import MakeJob

from runtimes.process.collectives import free_port
from runtimes.train.checkpoints import Checkpoints

chips.importorskip("jax")
pytestmark = pytest.mark.slow
StartJob = Callable[..., Any]  # of conftest.py: a Child
PART = """
import os, signal, sys
from runtimes.jax import device
from runtimes.process.launcher import leave
from runtimes.process.launcher import Ranks
from runtimes.process.launcher import STOPPED, Stop
from runtimes.process.collectives import join_hosts
ranks, stop = Ranks.here(), Stop()
stop.listen()
hosts = join_hosts(ranks)
device.join(ranks, hosts, "cpu")
device.start("cpu", None, "float32")
hosts.any(False)
if sys.argv[1] == "lost":
    if not ranks.first:
        os.kill(os.getpid(), signal.SIGKILL)
    leave(3)
if sys.argv[1] == "stopped":
    stop.defer()
    os.kill(os.getpid(), signal.SIGTERM)
device.shut_down(ranks, hosts)
leave(STOPPED if stop.requested else 0)
"""


def end(how: str) -> list[int]:
    """Exit codes of two processes."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PART, how], env={**os.environ, **common, "RANK": str(rank)}
        )
        for rank in range(2)
    ]
    try:
        return [process.wait(240) for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.soak  # those of test_as_torch.py do so too
def test_processes_part_in_order() -> None:
    assert end("orderly") == [0, 0]


@pytest.mark.extended
def test_one_whose_other_is_lost_ends_with_its_own_code() -> None:
    """It neither waits for the other nor is aborted."""
    assert end("lost") == [3, -9]


@pytest.mark.extended
def test_a_signal_requests_a_stop() -> None:
    """JAX's preemption service would take it."""
    assert end("stopped") == [143, 143]


@pytest.mark.soak
def test_a_stopped_run_has_a_checkpoint(make_job: MakeJob, start_job: StartJob) -> None:
    settings = {"processes": 2, "steps": 5000, "checkpointing_steps": 5000, "logging_steps": 1}
    job = make_job(runtime="jax", **settings)
    with chips.standing_in("jax"):
        child = start_job(job)
    child.step_of_first("progress")
    child.process.terminate()
    assert child.end() == 143
    assert Checkpoints(job.work, 9).latest() is not None
