"""Engine `ray`: a running Ray cluster places one actor a host, which starts the agent there.

Each attempt has a driver process of its own, `tasks.hosts.ray_driver`, and a new placement group: a
node that has joined meanwhile is used. If the driver ends, Ray ends the actors and the agents stop.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from uuid import uuid4

from artifacts.lock import check_held
from artifacts.store import Store
from configs.errors import Away, Refused
from configs.settings.clusters import Ray
from configs.settings.recipe import Recipe
from configs.settings.train import Train
from tasks.beam.workers import Workers, out_of_reach
from tasks.hosts.engine import AFTER_GRACE, Agents, passed_environment
from tasks.hosts.lines import Lines
from tasks.hosts.ray_driver import describe, suits

log = logging.getLogger("kiln")
#: Seconds for a driver to kill all ranks and end.
KILL_SECONDS = 30.0
#: Seconds for the cluster to list its nodes.
CHECK_SECONDS = 60.0
#: Resources of Ray that are accelerators.
CHIPS = ("GPU", "TPU", "HPU", "NPU")


class _Driver:
    """A driver process: its messages and the agents' lines, in order."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # closed below
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", "tasks.hosts.ray_driver"],
            env={
                "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
                "RAY_USAGE_STATS_ENABLED": "0",
                **os.environ,
            },
            cwd="/",  # Ray adds this folder to the import path of the hosts
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._lines = Lines()
        self._lines.follow(self._process.stdout)

    def tell(self, do: str, **fields: Any) -> None:
        """Send a command; a driver that has ended gets none."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
            self._process.stdin.flush()

    def read(self, seconds: float) -> list[str] | None:
        """New lines, after at most `seconds`; None once the driver has ended."""
        return self._lines.read(seconds)

    def last_words(self) -> str:
        """The last line of its errors."""
        self._errors.seek(0)
        lines = [line for line in self._errors.read().splitlines() if line.strip()]
        return lines[-1][-400:] if lines else "no error was printed"

    def end(self, seconds: float) -> None:
        """Wait for its end, or kill it."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            self._errors.close()


def _message(line: str) -> dict[str, Any]:
    """A message of the driver's own; empty for a line of an agent."""
    with suppress(ValueError):
        message = json.loads(line)
        if isinstance(message, dict) and "ray" in message:
            return message
    return {}


def _raise(message: dict[str, Any]) -> None:
    """Raise the error that a message tells, if it is one."""
    kinds = {"refused": Refused, "away": Away}
    if (kind := kinds.get(message.get("ray", ""))) is not None:
        raise kind(f"ray: {message['text']}")


@dataclass
class RayEngine:
    """The attempts of one training.

    Attributes:
        owner: names the training in the marks of its processes on the hosts.
        runtime: its interpreter on each host runs the agent.
    """

    settings: Ray
    hosts: int
    owner: str
    runtime: str
    name: str = "ray"
    _driver: _Driver | None = None
    _address: str = ""  # HOST:PORT, where rank 0 will listen
    _lost: str | None = None
    _ended: bool = False

    def reserve(self) -> bool:
        """Wait until a placement group has the nodes, and each node an actor."""
        self.end()
        self._lost = None
        self._ended = False
        self._driver = _Driver()
        what = {"hosts": self.hosts, "bundle": self.settings.bundle, "runtime": self.runtime}
        self._driver.tell("reserve", address=self.settings.address, **what)
        while (lines := self._driver.read(1.0)) is not None:
            for line in lines:
                message = _message(line)
                _raise(message)
                match message.get("ray"):
                    case "waits":
                        log.info("ray: %s", message["text"])
                    case "lost":
                        log.warning("ray: %s", message["text"])
                        return False
                    case "ready":
                        self._address = message["address"]
                        return True
            check_held()
        raise Away(f"ray: the driver has ended: {self._driver.last_words()}")

    def start(self, agents: Agents) -> None:
        """Start an agent on each host, in the host's own environment of the runtime."""
        assert self._driver is not None
        attempt = uuid4().hex[:8]
        numbers = range(self.hosts)
        commands = [agents.command(str(n), self._address, "--watch-stdin") for n in numbers]
        self._driver.tell(
            "start",
            arguments=[command[1:] for command in commands],
            variables=passed_environment(self.settings.environment),
            marks=[f"{self.owner}-{attempt}-{number}" for number in numbers],
            grace=agents.grace + AFTER_GRACE,
        )

    def read(self, seconds: float) -> list[str] | None:
        """New lines; None also after the loss of a host, without which no rank goes on."""
        assert self._driver is not None
        if self._ended:
            return None
        if (new := self._driver.read(seconds)) is None:
            self._ended = True
            self._lost = f"the driver has ended: {self._driver.last_words()}"
            return None
        lines = list[str]()
        for line in new:
            message = _message(line)
            if not message:
                lines.append(line)
            elif message["ray"] in ("lost", "ended"):
                self._ended = True
                self._lost = self._lost or message.get("text")
        return lines or (None if self._ended else [])

    def stop(self) -> None:
        """Tell all agents to stop."""
        if self._driver is not None:
            self._driver.tell("stop")

    def kill(self) -> None:
        """Kill all agents and ranks on the nodes that answer; the placement group ends with it."""
        if self._driver is not None:
            self._driver.tell("kill")
            self._driver.end(KILL_SECONDS)
            self._driver = None

    def lost(self) -> str | None:
        """Which host was lost, in the driver's words."""
        return self._lost

    def end(self) -> None:
        """End the driver, and with it the placement group."""
        self.kill()


def check(settings: Ray, recipe: Recipe, hosts: int, setting: str) -> None:
    """Raise Refused if the cluster cannot compute a recipe; Away if it does not answer.

    Args:
        setting: that asks for so many hosts.
    """
    if find_spec("ray") is None:
        raise Refused("ray: Ray is not installed here: run `make setup-ray`, here and on the hosts")
    listed = list_nodes(settings)
    if len({node["machine"] for node in listed}) > 1:
        place = Store(recipe.store).url
        if why := out_of_reach(place, Workers.REMOTE, recipe.shared_folders):
            raise Refused(f"{place} is {why}", setting="store")
    nodes = [node["resources"] for node in listed]
    _check_chips(settings, recipe.train, nodes)
    bundle = settings.bundle
    suitable = sum(suits(node, bundle) for node in nodes)
    if suitable < hosts and not settings.autoscaling:
        each = "; ".join(describe(_shown(node)) for node in nodes)
        raise Refused(
            f"{hosts} nodes with {describe(bundle)} are asked for, and {suitable} of "
            f"the cluster's {len(nodes)} have them ({each})",
            setting=setting,
            remedy="lower it or ray.resources, add nodes, or set ray.autoscaling",
        )


def _check_chips(settings: Ray, train: Train, nodes: list[dict[str, float]]) -> None:
    """Raise Refused if a host's share of the nodes' chips is not asked for, or too small."""
    there = sorted({chip for node in nodes for chip in CHIPS if node.get(chip)})
    if not there or train.device.startswith("cpu"):
        return
    chips = sum(settings.resources.get(chip, 0) for chip in CHIPS)
    if not chips:
        words = f"the nodes have {', '.join(there)}, which Ray would give to others meanwhile"
    elif chips < train.processes:
        words = f"{chips:g} chips are less than the {train.processes} of train.processes"
    else:
        return
    remedy = f"ask for a host's share, such as {{{there[0]}: {train.processes}}}"
    raise Refused(words, setting="ray.resources", remedy=remedy)


def list_nodes(settings: Ray) -> list[dict[str, Any]]:
    """`machine` and `resources` of each node.

    Raises Refused for a cluster of other versions, and Away without an answer.
    """
    with _driving() as driver:
        driver.tell("nodes", address=settings.address)
        end = time.monotonic() + CHECK_SECONDS
        while time.monotonic() < end:
            if (lines := driver.read(1.0)) is None:
                raise Away(f"ray: the cluster does not answer: {driver.last_words()}")
            for line in lines:
                message = _message(line)
                _raise(message)
                if message.get("ray") == "nodes":
                    return list(message["nodes"])
    raise Away(f"ray: the cluster does not answer in {CHECK_SECONDS:g} s")


@contextmanager
def _driving() -> Iterator[_Driver]:
    driver = _Driver()
    try:
        yield driver
    finally:
        driver.end(1.0)


def _shown(node: dict[str, float]) -> dict[str, float]:
    """A node's resources without Ray's own names and sizes of memory."""
    hidden = ("node:", "memory", "object_store_memory", "accelerator_type:")
    return {name: n for name, n in node.items() if not name.startswith(hidden)}
