"""Real engines on this machine: a Dask cluster, and Beam's job service with external workers."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from distributed import Scheduler
from kiln_command import ROOT
from loopback_server import free_port

BIN = Path(sys.executable).parent
START_SECONDS = 120  # for a busy machine


class LateHeartbeats:
    """Dask's schedulers in this process answer heartbeats of workers so late that none ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = threading.Event()  # there was one
        self._answer = Scheduler.heartbeat_worker
        monkeypatch.setattr(Scheduler, "heartbeat_worker", lambda *a, **b: self._late(*a, **b))

    def _late(self, scheduler: Scheduler, **of_worker: Any) -> Any:
        answer = self._answer(scheduler, **of_worker)
        if "executing" not in of_worker:  # a worker registers by the same method
            return answer
        self.asked.set()
        return asyncio.sleep(START_SECONDS, answer)


@contextmanager
def dask_cluster(folder: Path, workers: int, env: Mapping[str, str] | None = None) -> Iterator[str]:
    """The address of a scheduler with worker processes, as docs/engines.md starts them.

    Args:
        env: additional environment variables of the workers.
    """
    address = f"tcp://127.0.0.1:{free_port()}"
    scheduler = ["scheduler", "--host", address, "--no-dashboard", "--no-show"]
    worker = ["worker", address, "--host", "127.0.0.1", "--nthreads", "1", "--no-nanny"]
    worker += ["--preload", "tasks.beam.pipeline"]
    commands = [scheduler, *[[*worker, "--no-dashboard"]] * workers]
    with running(folder, *[[str(BIN / "dask"), *words] for words in commands], env=env):
        wait_for(address)
        yield address


@contextmanager
def job_service(
    folder: Path, workers: int, env: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """Beam options of a job service, whose jobs use worker processes of an external pool.

    Args:
        env: additional environment variables of the workers.
    """
    service, pool = free_port(), free_port()
    python = str(BIN / "python")
    serve = [python, str(ROOT / "tests/engines_job_service.py"), str(service), str(workers)]
    hold = [python, "-m", "apache_beam.runners.worker.worker_pool_main"]
    with running(folder, serve, [*hold, f"--service_port={pool}"], env=env):
        for port in (service, pool):
            wait_for(f"tcp://127.0.0.1:{port}")
        yield {
            "runner": "PortableRunner",
            "job_endpoint": f"127.0.0.1:{service}",
            "environment_type": "EXTERNAL",
            "environment_config": f"127.0.0.1:{pool}",
        }


@contextmanager
def running(
    folder: Path, *commands: list[str], env: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run commands until the block ends; each runs and logs in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    variables = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",  # Beam's pool starts `python`
        "PYTHONPATH": str(ROOT),
        **(env or {}),
    }
    children = []
    try:
        for number, command in enumerate(commands):
            with (folder / f"{number}.log").open("wb") as log:
                child = subprocess.Popen(
                    command,
                    cwd=folder,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            children.append(child)
        yield
    finally:
        for child in reversed(children):
            child.terminate()
        for child in children:
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def wait_for(address: str) -> None:
    """Wait until something listens at tcp://host:port."""
    host, _, port = address.removeprefix("tcp://").partition(":")
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection((host, int(port)), 5).close()
            return
        except OSError:
            assert time.monotonic() < until, f"nothing listens at {address}"
            time.sleep(0.1)
