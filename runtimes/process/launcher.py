"""Rank 0 starts the other ranks of its machine, reads their events, and ends them.

A child has a pipe for its events, and a pipe as standard input that closes when rank 0 dies. A byte
on it passes on a signal that requests a stop. Under torchrun (RANK is set) the launcher starts no
process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from runtimes.process.events import EVENT_FD
from runtimes.process.ranks import FOLLOWER
from runtimes.process.signals import STOP_SIGNALS

#: Fields of an event `error` with which rank 0 reports it again.
FACTS = ("wrong_input", "errno", "file", "away", "traceback")
#: Time limit in seconds for rank 0 to fail by itself after the loss of a child.
NOTICE_SECONDS = 10.0
#: Seconds until all ranks that fail as a consequence of a loss have reported their errors.
WAKE_SECONDS = 1.0
#: Time limit in seconds for the children to exit after rank 0 has finished.
END_SECONDS = 60.0


class LostRank(RuntimeError):
    """Another process of the run failed or was killed; the message states its rank and cause."""

    def __init__(self, rank: int, code: int, error: dict[str, Any]) -> None:
        self.code = 1 if code < 0 else code
        self.facts = {name: error[name] for name in FACTS if name in error}
        self.failed_at = float(error.get("time") or 0.0)  # 0 if a signal killed it
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        message = error.get("message") or f"process {rank} of the run (from 0) {ended}"
        super().__init__(message)


@dataclass
class _Child:
    """A child process and the content of its events."""

    rank: int
    process: subprocess.Popen[bytes]
    events: IO[str]
    finished: bool = False  # it reported its result: a later exit is no loss
    error: dict[str, Any] | None = None

    def ask_to_stop(self) -> None:
        """Request a stop without a signal, of which a second one would kill the process."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended
            os.write(self.process.stdin.fileno(), b"\n")


class Launcher:
    """Context manager that runs the other ranks of this machine as child processes.

    It sets the environment variables that `Ranks.here` reads.

    Args:
        job: path of the job file.
        count: number of processes, this one included; 1 starts no child.
        on_loss: called in a thread if a child is lost and rank 0 does not fail by itself, because
            it waits in a collective. It must end this process.
    """

    def __init__(self, job: Path, count: int, on_loss: Callable[[LostRank], None]) -> None:
        self._job = job
        self._count = count
        self._on_loss = on_loss
        self._children: list[_Child] = []
        self._lost: list[LostRank] = []
        self._loss = threading.Event()
        self._shutting_down = threading.Event()
        self._port = socket.socket()  # of the rendezvous

    def __enter__(self) -> None:
        if self._count == 1:
            return
        os.environ |= _rendezvous_environment(self._count, _reserve_port(self._port))
        self._children = [_start(self._job, rank) for rank in range(1, self._count)]
        for child in self._children:
            threading.Thread(target=self._follow_events, args=(child,), daemon=True).start()
        threading.Thread(target=self._watch, name="launcher", daemon=True).start()
        self._pass_on_signals()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Wait for the children; after an error, kill them.

        Raises:
            LostRank: a child was lost first, and the error here is a consequence.
        """
        self._port.close()
        # A lost connection raises here before the lost child's exit is known: wait for that.
        suspect = isinstance(error, RuntimeError) and bool(self._children)
        lost = self._root_cause(NOTICE_SECONDS) if suspect else None
        self._shutting_down.set()
        if self._children:
            os.close(signal.set_wakeup_fd(-1))  # this ends the thread that reads it
        self._end(END_SECONDS if error is None else 0.0)
        if lost is not None:
            raise lost from None

    def _follow_events(self, child: _Child) -> None:
        for line in child.events:
            try:
                event = json.loads(line)
            except ValueError:  # a killed child may leave an incomplete line
                continue
            child.finished |= event["event"] == "result"
            if event["event"] == "error":
                child.error = event
        code = child.process.wait()
        if not child.finished and not self._shutting_down.is_set():
            self._lost.append(LostRank(child.rank, code, child.error or {}))
            self._loss.set()

    def _pass_on_signals(self) -> None:
        """Tell the children of a stop signal, even while this process waits in a collective.

        Python's own handler runs after the collective, which may wait for a child's slow read.
        """
        read, write = os.pipe()
        os.set_blocking(write, False)  # signal.set_wakeup_fd requires it
        signal.set_wakeup_fd(write)
        threading.Thread(target=self._tell_of_stop, args=(read,), daemon=True).start()

    def _tell_of_stop(self, signals: int) -> None:
        with os.fdopen(signals, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] in STOP_SIGNALS:
                    for child in self._children:
                        child.ask_to_stop()

    def _watch(self) -> None:
        self._loss.wait()
        if not self._shutting_down.wait(NOTICE_SECONDS) and (lost := self._root_cause(0.0)):
            self._shutting_down.set()
            self._end(0.0)
            self._on_loss(lost)

    def _root_cause(self, seconds: float) -> LostRank | None:
        """The root-cause rank: one killed without a message, else the one with the earliest error.

        None if no child is lost within `seconds`.
        """
        if not self._loss.wait(seconds):
            return None
        time.sleep(WAKE_SECONDS)
        return min(self._lost, key=lambda lost: lost.failed_at)

    def _end(self, seconds: float) -> None:
        """Kill the children that do not exit within `seconds`.

        A run without an error ends after all ranks have written their checkpoint files.
        """
        deadline = time.monotonic() + seconds
        for child in self._children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()


def count_cores() -> int:
    """Number of CPU cores in this process's affinity mask, or of the machine if unknown."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _reserve_port(holder: socket.socket) -> int:
    """A free port, which is nobody else's until the rendezvous listens on it or `holder` closes.

    Imports take seconds, in which the system would give a free port to any connection of this
    machine. It gives none that is bound; a server with SO_REUSEADDR may still bind it.
    """
    holder.bind(("127.0.0.1", 0))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return int(holder.getsockname()[1])


def _rendezvous_environment(count: int, port: int) -> dict[str, str]:
    """torchrun's environment variables for rank 0 of `count` processes, which share the cores."""
    threads = max(1, count_cores() // count)
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "RANK": "0",
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _start(job: Path, rank: int) -> _Child:
    events, write = os.pipe()
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), EVENT_FD: str(write), FOLLOWER: "1"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-u", "-m", "runtimes", str(job)],
        env={**os.environ, **variables},
        pass_fds=(write,),
        stdin=subprocess.PIPE,
    )
    os.close(write)
    return _Child(rank, process, os.fdopen(events))
