"""A run that is cancelled in Prefect ends although no worker ends it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from kiln_command import ROOT, environment
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling, Running
from prefect_server import Server

from flows.flow_process import _ended, _is_due
from tasks.child_process import stopping

#: A run of a deployment, or of none, without a worker.
PROGRAM = """
import subprocess, sys, time
from contextlib import suppress
from functools import partial
from prefect import flow, runtime
from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow
from flows import flow_process
from flows.flow_process import prepare_process
from tasks import child_process

JOB = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(); time.sleep(3)"

flow_process.POLL_SECONDS = 0.2
flow_process.WORKER_SECONDS = float(sys.argv[2])

def interrupted(job):
    raise KeyboardInterrupt

@flow(name="sleeper")
def sleeper():
    prepare_process()
    job = subprocess.Popen([sys.executable, "-c", JOB], stdout=subprocess.PIPE)
    job.stdout.readline()
    print(runtime.flow_run.id, flush=True)
    if len(sys.argv) > 4:
        stop = partial(child_process._stop, job, grace_seconds=30)
        with suppress(KeyboardInterrupt):
            child_process._wait = interrupted
            child_process.wait_for_result(job, None, [], stop, job.kill)
        print("its job ended with", job.returncode, flush=True)
    time.sleep(float(sys.argv[3]))

run = None
if sys.argv[1] == "deployment":
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow(sleeper), "sleeper")
        run = client.create_flow_run_from_deployment(deployment)
run_flow(sleeper, flow_run=run)
print("completed", flush=True)
"""


@pytest.fixture
def start(tmp_path: Path, api: str) -> Callable[..., subprocess.Popen[str]]:
    """Starts PROGRAM: `start(kind, worker_seconds, sleep_seconds)`."""

    @contextmanager
    def run(*words: object) -> Iterator[subprocess.Popen[str]]:
        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *map(str, words)],
            env={**environment(tmp_path, api), "PREFECT_LOGGING_LEVEL": "INFO"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield child
        finally:
            child.kill()
            child.communicate()

    return run


def cancel(server: Server, run: str) -> None:
    """Cancel a run as Prefect's UI and command line do."""
    server.ask(f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "worker_seconds"), [("none", 600), ("deployment", 0.5)])
def test_a_cancelled_run_ends(
    start: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    api: str,
    kind: str,
    worker_seconds: float,
) -> None:
    server = Server(tmp_path, api)
    with start(kind, worker_seconds, 60) as child:
        assert child.stdout is not None
        run = child.stdout.readline().strip()
        cancel(server, run)
        out, error = child.communicate(timeout=50)
    assert child.returncode == -signal.SIGTERM, error
    assert "completed" not in out
    assert "the run is cancelled in Prefect: it ends" in error
    assert server.state(run) == "Cancelled"


@pytest.mark.slow
def test_the_worker_ends_a_run_of_a_deployment(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, api: str
) -> None:
    server = Server(tmp_path, api)
    with start("deployment", 600, 3) as child:
        assert child.stdout is not None
        run = child.stdout.readline().strip()
        cancel(server, run)
        out, error = child.communicate(timeout=50)
    assert (child.returncode, out) == (0, "completed\n"), error


@pytest.mark.slow
def test_a_job_that_writes_its_checkpoint_is_not_killed(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, api: str
) -> None:
    server = Server(tmp_path, api)
    with start("none", 600, 60, "stops") as child:
        assert child.stdout is not None
        cancel(server, child.stdout.readline().strip())
        out, error = child.communicate(timeout=50)
    assert child.returncode == -signal.SIGTERM, error
    assert out == "its job ended with 0\n"


def test_a_worker_has_time_to_end_a_run_of_a_deployment() -> None:
    alone = FlowRun(flow_id=uuid4())
    deployed = FlowRun(flow_id=uuid4(), deployment_id=uuid4())
    now = time.monotonic()
    assert _is_due(alone, now)
    assert not _is_due(deployed, now - 60)
    assert _is_due(deployed, now - 180)


def test_a_run_that_ends_while_the_server_is_told_gets_no_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, signals = FlowRun(flow_id=uuid4(), state=Running()), list[int]()
    told: Any = SimpleNamespace(set_flow_run_state=lambda *_, **__: stopping.set())
    away = SimpleNamespace(getpid=os.getpid, kill=lambda _, number: signals.append(number))
    monkeypatch.setattr("flows.flow_process.os", away)
    try:
        assert not _ended(told, run, Cancelling())
    finally:
        stopping.clear()
    assert signals == []
    assert run.state is not None and run.state.is_running()
