"""A real Ray cluster on this machine: each node has an address of loopback of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from chips import unless_required
from kiln_command import ROOT
from loopback_server import free_port
from waiting import wait_until

START_SECONDS = 120  # for a busy machine
#: The resource of a node that may train; a host takes one.
HOST = "KILN"
#: The head declares a frozen node dead after 62 s by default, and after 15 s so.
HEALTH = {
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 5,
}


def require_ray() -> None:
    """Skip the calling test without Ray; fail it if KILN_MUST_RUN names ray."""
    reason = "" if find_spec("ray") else "no Ray: make setup-ray"
    if unless_required("ray", reason):
        pytest.skip(reason)


@dataclass
class RayCluster:
    """A running cluster.

    Attributes:
        folder: its files and logs.
        port: of the head, which is node 0.
    """

    folder: Path
    port: int = field(default_factory=free_port)
    _nodes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """HOST:PORT of the head."""
        return f"{self.node_address(0)}:{self.port}"

    @property
    def nodes(self) -> list[int]:
        """Numbers of the nodes; 0 is the head."""
        return sorted(self._nodes)

    @staticmethod
    def node_address(number: int) -> str:
        """The address of a node."""
        return f"127.0.0.{10 + number}"  # Ray replaces 127.0.0.1 by that of a network card

    def add(self, number: int) -> None:
        """Start a node, and wait until it has joined; number 0 is the head."""
        of_head = [
            "--head",
            f"--port={self.port}",
            "--include-dashboard=false",
            f"--ray-client-server-port={free_port()}",
            f"--temp-dir={self.folder}",
            f"--system-config={json.dumps(HEALTH)}",
        ]
        with (self.folder / f"node-{number}.log").open("wb") as log:
            self._nodes[number] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
                    *(of_head if number == 0 else [f"--address={self.address}"]),
                    f"--node-ip-address={self.node_address(number)}",
                    "--num-cpus=1",
                    f"--resources={json.dumps({HOST: 1})}",
                    f"--object-store-memory={80 << 20}",
                    "--disable-usage-stats",
                ],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        process = self._nodes[number]
        wait_until(
            lambda: "block forever" in self.log(number),
            START_SECONDS,
            alive=lambda: process.poll() is None,
            says=lambda: self.log(number),
        )

    @property
    def _environment(self) -> dict[str, str]:
        """That of all hosts: our code and threads, and none of a test's variables."""
        ours = {k: v for k, v in os.environ.items() if not k.startswith(("KILN_", "PREFECT_"))}
        threads = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        return {**ours, **threads, "PYTHONPATH": str(ROOT)}

    def log(self, number: int) -> str:
        """What a node has printed."""
        return (self.folder / f"node-{number}.log").read_text(errors="replace")

    def kill(self, number: int) -> None:
        """End a node as a power cut does, its agents and ranks included."""
        self.signal(number, signal.SIGKILL)
        self._nodes.pop(number).wait()

    def freeze(self, number: int) -> None:
        """Stop a node as a hung machine does: its connections stay, and nothing answers."""
        self.signal(number, signal.SIGSTOP)

    def signal(self, number: int, which: signal.Signals) -> None:
        """Send a signal to all processes of a node."""
        for process in self.processes(number):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(which)

    def processes(self, number: int) -> list[psutil.Process]:
        """Ray's processes of a node, and the agents and ranks that its actors started."""
        node = psutil.Process(self._nodes[number].pid)
        found = [node, *node.children(recursive=True)]
        return [*found, *(p for p in psutil.process_iter() if _is_detached_from(p, found))]

    def ranks(self) -> list[int]:
        """Ids of all agents and ranks of the cluster."""
        return [process.pid for process in psutil.process_iter() if _mark(process)]

    def stop(self) -> None:
        """Kill all nodes, the youngest first."""
        for number in reversed(self.nodes):
            self.kill(number)


def _mark(process: psutil.Process) -> dict[str, str]:
    """The variables of a process that an actor of ours has started; empty for others."""
    with suppress(psutil.Error):
        variables = process.environ()
        if "KILN_RAY_HOST" in variables:
            return dict(variables)
    return {}


def _is_detached_from(process: psutil.Process, node: list[psutil.Process]) -> bool:
    """Whether a process was started by an actor of a node; Ray names the raylet to its workers."""
    raylet = _mark(process).get("RAY_RAYLET_PID")
    return raylet is not None and int(raylet) in {each.pid for each in node}


@contextmanager
def ray_cluster(nodes: int = 2) -> Iterator[RayCluster]:
    """Run a cluster of nodes 0, 1, ... until the block ends."""
    require_ray()
    # A socket's path has at most 107 bytes, which pytest's folders with names of tests exceed.
    cluster = RayCluster(Path(tempfile.mkdtemp(prefix="kiln-ray-")))
    try:
        for number in range(nodes):
            cluster.add(number)
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(cluster.folder, ignore_errors=True)
