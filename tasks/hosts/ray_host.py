"""The actor of engine `ray` on one host: it starts the agent there and passes its lines on.

Ray imports this module on the hosts, so they need Kilnworks as this machine has it. Agent and ranks
run in the runtime's own environment. They outlive this actor until the agent has stopped the ranks.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from configs.errors import Refused

#: Variable that marks all processes of a host: (training, attempt, host), joined by `-`.
MARK = "KILN_RAY_HOST"
#: Seconds for killed processes to end.
END_SECONDS = 10.0
# Ray kills an actor's children with it; as a grandchild, the agent can first end its ranks.
_DETACHED = (
    "import os, sys; os.fork() and os._exit(0); os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"
)
_THREADS = "OMP_NUM_THREADS"


class Host:
    """One host of an attempt.

    Args:
        runtime: its interpreter on this host runs the agent.
    """

    def __init__(self, runtime: str) -> None:
        self._runtime = runtime
        self._port = socket.socket()  # of the rendezvous, if this is host 0
        self._agent: subprocess.Popen[str] | None = None
        self._mark = ""

    def facts(self) -> dict[str, str]:
        """`node` (Ray's id), `address`, free `port`, `code` (digest), `refused` (why, or "")."""
        import ray

        from tasks.code_version import CODE

        address = ray.util.get_node_ip_address()
        self._port.bind((address, 0))
        # Rank 0 alone can listen on it until this socket closes: see runtimes/process/launcher.py.
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        refused = ""
        try:
            self._interpreter()
        except Refused as error:
            refused = str(error)
        return {
            "node": ray.get_runtime_context().get_node_id(),
            "address": address,
            "port": str(self._port.getsockname()[1]),
            "code": CODE,
            "refused": refused,
        }

    def lines(
        self, arguments: Sequence[str], variables: Mapping[str, str], mark: str
    ) -> Iterator[str]:
        """Start the agent; each line that it writes, until it ends.

        Args:
            arguments: those of Python.
            variables: of the flow's machine; the host's own ones win.
            mark: of this attempt and host. What is left of the training's other attempts is killed.
        """
        self._mark = mark
        training, attempt, _ = mark.split("-")
        ours = f"{training}-{attempt}-"
        _kill(lambda theirs: theirs.startswith(f"{training}-") and not theirs.startswith(ours))
        self._agent = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _DETACHED, self._interpreter(), *arguments],
            env={**variables, **_own_variables(), MARK: mark},
            stdin=subprocess.PIPE,  # it ends with this process, too
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert self._agent.stdout is not None
        for line in self._agent.stdout:  # noqa: UP028  # Ray sends to the generator, a file takes nothing
            yield line

    def stop(self) -> None:
        """End the agent's standard input, which it takes as SIGTERM."""
        if self._agent is not None and self._agent.stdin is not None:
            self._agent.stdin.close()

    def kill(self) -> None:
        """Kill the agent and all ranks of this host, and wait for their end."""
        if self._mark:  # otherwise nothing was started
            _kill(lambda theirs: theirs == self._mark)

    def _interpreter(self) -> str:
        from runtimes.registry import interpreter

        return interpreter(self._runtime)


def _own_variables() -> dict[str, str]:
    """This process's variables, but the number of threads that Ray sets for an actor."""
    variables = dict(os.environ)
    began_with = Path("/proc/self/environ").read_bytes().split(b"\0")
    if not any(variable.startswith(f"{_THREADS}=".encode()) for variable in began_with):
        variables.pop(_THREADS, None)
    return variables


def _kill(is_chosen: Callable[[str], bool]) -> None:
    """Kill the marked processes whose mark is chosen, and those that they start meanwhile."""
    end = time.monotonic() + END_SECONDS
    while time.monotonic() < end:
        marks = {process: _mark_of(process) for process in psutil.process_iter()}
        chosen = [process for process, mark in marks.items() if mark and is_chosen(mark)]
        if not chosen:
            break
        for process in chosen:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(chosen, END_SECONDS)


def _mark_of(process: psutil.Process) -> str:
    """The mark of a process; empty without one."""
    with suppress(psutil.Error):  # it has ended, or is another user's
        return str(process.environ().get(MARK, ""))
    return ""
