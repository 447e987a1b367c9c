"""The driver of engine `ray`, a process of its own: Ray ends its driver if the cluster's head dies.

It reads commands as JSON lines from standard input, and writes the agents' lines, and messages of
its own: `{"ray": KIND, ...}`. The first command says where the cluster is and what to reserve.

| command                 | then                                                               |
|-------------------------|--------------------------------------------------------------------|
| nodes                   | message `nodes` with machine and resources of each; the end         |
| reserve                 | messages `waits`; then `ready` with host 0's address, or an error  |
| start                   | the agents' lines; `lost` if a host is lost; `ended` after the last |
| stop; end of input      | SIGTERM for the agents; after the end of input, the end            |
| kill                    | all agents and ranks are killed; the end                           |

Errors are the messages `refused`, `away` and `lost`, each with a `text`.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

from tasks.code_version import CODE
from tasks.hosts.ray_host import END_SECONDS, Host

#: Seconds for the head to accept a connection.
CONNECT_SECONDS = 10.0
#: Seconds between two messages about a wait.
TELL_SECONDS = 60.0
_writing = threading.Lock()


class End(Exception):
    """The driver has nothing more to do."""


def say(kind: str, **fields: Any) -> None:
    """Write a message of our own."""
    write(json.dumps({"ray": kind, **fields}))


def write(line: str) -> None:
    """Write one line."""
    with _writing:
        sys.stdout.write(line.rstrip("\n") + "\n")
        sys.stdout.flush()


def fail(kind: str, text: str) -> NoReturn:
    """Say an error and end."""
    say(kind, text=text)
    raise End


def connect(address: str | None) -> None:
    """Connect to a running cluster; this machine must be one of its nodes."""
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    if address is not None:
        host, _, port = address.rpartition(":")
        try:  # Ray itself would try for two minutes
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            fail("away", f"the cluster at {address} does not answer: {error}")
    try:
        ray.init(address=address or "auto", log_to_driver=False, configure_logging=False)
    except ConnectionError as error:
        fail("away", f"no cluster can be reached from this machine: {_one_line(error)}")
    except RuntimeError as error:  # of other versions
        fail("refused", _one_line(error))


def nodes() -> list[dict[str, Any]]:
    """`machine` and `resources` of each node that is alive."""
    import ray

    names = {"machine": "NodeManagerHostname", "resources": "Resources"}
    return [
        {name: node[theirs] for name, theirs in names.items()}
        for node in ray.nodes()
        if node["Alive"]
    ]


def suits(node: Mapping[str, float], bundle: Mapping[str, float]) -> bool:
    """Whether a node has the resources of a host, busy or not."""
    return all(node.get(name, 0) >= amount for name, amount in bundle.items())


class Attempt:
    """The hosts of one attempt.

    Args:
        commands: from standard input; None at its end.
    """

    def __init__(self, commands: queue.SimpleQueue[dict[str, Any] | None]) -> None:
        self._commands = commands
        self._hosts: list[Any] = []  # handles of actors
        self._facts: list[dict[str, str]] = []
        self._following: list[threading.Thread] = []
        self._lost = threading.Event()
        self._ending = threading.Event()

    def reserve(self, hosts: int, bundle: dict[str, float], runtime: str) -> None:
        """Wait for the machines, and for an actor on each."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group([bundle] * hosts, strategy="STRICT_SPREAD")
        told = -TELL_SECONDS
        while not group.wait(1):
            self._end_if_told()
            if time.monotonic() > told + TELL_SECONDS:
                told = time.monotonic()
                say("waits", text=_missing(hosts, bundle))
        others = {name: n for name, n in bundle.items() if name not in ("CPU", "GPU", "memory")}
        for number in range(hosts):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            actor = ray.remote(Host).options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                memory=bundle.get("memory"),
                resources=others,
                scheduling_strategy=place,
                max_restarts=0,
                max_concurrency=4,  # it stops and kills while it passes lines on
            )
            self._hosts.append(actor.remote(runtime))
        self._ask_for_facts()
        first = self._facts[0]
        say("ready", address=f"{first['address']}:{first['port']}")

    def _ask_for_facts(self) -> None:
        import ray

        waiting = [host.facts.remote() for host in self._hosts]
        references = list(waiting)
        while waiting:
            self._end_if_told()
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=1)
        try:
            self._facts = ray.get(references)
        except ray.exceptions.RayActorError as error:
            kind = "refused" if error.actor_init_failed else "lost"
            fail(kind, f"a host cannot run Kilnworks: {_one_line(error)}")
        except ray.exceptions.RayTaskError as error:
            fail("refused", f"a host cannot run Kilnworks: {_one_line(error)}")
        for facts in self._facts:
            node = f"node {facts['address']}"
            if facts["refused"]:
                fail("refused", f"{node}: {facts['refused']}")
            if facts["code"] != CODE:
                words = f"{node} has other code of Kilnworks ({facts['code']}) than this machine"
                fail("refused", f"{words} ({CODE}): install the same on all")

    def start(
        self, arguments: list[list[str]], variables: dict[str, str], marks: list[str]
    ) -> None:
        """Start the agents, and pass their lines on."""
        for number, host in enumerate(self._hosts):
            lines = host.lines.options(num_returns="streaming")
            stream = lines.remote(arguments[number], variables, marks[number])
            thread = threading.Thread(target=self._follow, args=(number, stream), daemon=True)
            self._following.append(thread)
        for thread in self._following:
            thread.start()
        threading.Thread(target=self._say_ended, daemon=True).start()

    def _follow(self, number: int, stream: Any) -> None:
        import ray

        try:
            for reference in stream:
                write(ray.get(reference))
        except ray.exceptions.RayError as error:
            self._lost.set()
            if not self._ending.is_set():
                say("lost", text=self._why(number, error))

    def _why(self, number: int, error: Exception) -> str:
        """Why a host is lost. An actor that is unavailable has lost its collective as well."""
        import ray

        facts = self._facts[number]
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        host = f"host {number} is lost: Ray's node {facts['address']}"
        if facts["node"] not in alive:
            return f"{host} is dead"
        if isinstance(error, ray.exceptions.ActorUnavailableError):
            return f"{host} cannot be reached"
        return f"{host} has lost its actor: {_one_line(error)}"

    def _say_ended(self) -> None:
        for thread in self._following:
            thread.join()
        say("ended")

    def stop(self) -> None:
        """Send SIGTERM to the agents."""
        for host in self._hosts:
            host.stop.remote()

    def finish(self, seconds: float) -> None:
        """Wait for the end of stopped agents; a lost host ends the wait, as no rank can go on."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._lost.is_set():
            if not any(thread.is_alive() for thread in self._following):
                break
            time.sleep(0.1)
        self.kill()

    def kill(self) -> None:
        """Kill agents and ranks on all hosts that answer."""
        import ray

        self._ending.set()
        killed = [host.kill.remote() for host in self._hosts]
        if killed:
            ray.wait(killed, num_returns=len(killed), timeout=2 * END_SECONDS)

    def _end_if_told(self) -> None:
        with suppress(queue.Empty):
            self._commands.get_nowait()  # the input's end, stop or kill: nothing runs yet
            raise End


def _missing(hosts: int, bundle: Mapping[str, float]) -> str:
    there = nodes()
    fitting = sum(suits(node["resources"], bundle) for node in there)
    if fitting >= hosts:
        return f"waiting for {hosts} nodes with {describe(bundle)}: too few are free"
    return (
        f"waiting for {hosts} nodes with {describe(bundle)}: "
        f"{fitting} of the {len(there)} nodes of the cluster have them"
    )


def describe(bundle: Mapping[str, float]) -> str:
    """Resources in words, such as `CPU 1, GPU 8`."""
    return ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())


def _one_line(error: Exception) -> str:
    """The end of an error's message: the reason of an actor's death stands last."""
    return " ".join(str(error).split())[-400:]


def _read_commands(commands: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    for line in sys.stdin:
        commands.put(json.loads(line))
    commands.put(None)


def main() -> None:
    """Obey the commands until the last one."""
    commands = queue.SimpleQueue[dict[str, Any] | None]()
    threading.Thread(target=_read_commands, args=(commands,), daemon=True).start()
    attempt = Attempt(commands)
    grace = 0.0
    while (command := commands.get()) is not None:
        match command.pop("do"):
            case "nodes":
                connect(command["address"])
                say("nodes", nodes=nodes())
                return
            case "reserve":
                connect(command.pop("address"))
                attempt.reserve(**command)
            case "start":
                grace = command.pop("grace")
                attempt.start(**command)
            case "stop":
                attempt.stop()
            case "kill":
                attempt.kill()
                return
    attempt.stop()  # the flow has ended
    attempt.finish(grace)


if __name__ == "__main__":
    with suppress(End):
        main()
    if (ray := sys.modules.get("ray")) is not None:
        ray.shutdown()
    os._exit(0)  # a thread waits in a read of standard input
