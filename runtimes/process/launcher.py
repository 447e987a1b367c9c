"""The first process of a run starts the others of its machine, hears from them, and ends them.

Each is started as a stage starts a runtime: with a pipe for events, and a pipe as standard input
that ends with us. Where torchrun has started the processes (RANK is set), none of this is needed.
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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from runtimes.process.events import EVENT_FD
from runtimes.process.ranks import FOLLOWER

#: Seconds in which this process must notice by itself that another one is lost.
NOTICE_SECONDS = 10.0
#: Seconds after which all that a loss has drawn with it have said so.
WAKE_SECONDS = 1.0
#: Seconds that the others have to end once the first has nothing left to do.
END_SECONDS = 60.0


class LostRank(RuntimeError):
    """Another process of the run has failed or was killed; the message says which and why."""

    def __init__(self, rank: int, code: int, error: dict[str, Any]) -> None:
        self.code = 1 if code < 0 else code
        self.wrong_input, self.errno = bool(error.get("wrong_input")), error.get("errno")
        self.traceback = error.get("traceback") or ""
        self.failed_at = float(error.get("time") or 0.0)  # unknown, where it had no time to say
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        message = error.get("message") or f"process {rank} of the run (from 0) {ended}"
        super().__init__(message)


@dataclass
class _Child:
    """Another process, and what it has said."""

    rank: int
    process: subprocess.Popen[bytes]
    events: IO[str]
    finished: bool = False  # it is done, or has stopped as all of them have
    error: dict[str, Any] | None = None


class Launcher:
    """The other processes of this machine, from `with` to its end.

    Args:
        job: the file that this process was given.
        count: processes in all; 1 starts none. The environment is set for `Ranks.here` to find.
        on_loss: called from a thread when another process is lost and this one does not notice: it
            may be waiting for it in a collective that never ends. It must end this process.
    """

    def __init__(self, job: Path, count: int, on_loss: Callable[[LostRank], None]) -> None:
        self._job, self._count, self._on_loss = job, count, on_loss
        self._children: list[_Child] = []
        self._lost: list[LostRank] = []
        self._loss, self._shutting_down = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        if self._count == 1:
            return
        os.environ |= _rendezvous_environment(self._count)
        self._children = [_start(self._job, rank) for rank in range(1, self._count)]
        for child in self._children:
            threading.Thread(target=self._follow_events, args=(child,), daemon=True).start()
        threading.Thread(target=self._watch, name="launcher", daemon=True).start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Wait for the others, or end them. Raises LostRank in place of what a loss has caused."""
        # A lost connection is noticed at once; whose it was, a moment later.
        suspect = isinstance(error, RuntimeError) and bool(self._children)
        lost = self._root_cause(NOTICE_SECONDS) if suspect else None
        self._shutting_down.set()
        self._end(END_SECONDS if error is None else 0.0)
        if lost is not None:
            raise lost from None

    def _follow_events(self, child: _Child) -> None:
        for line in child.events:
            try:
                event = json.loads(line)
            except ValueError:  # cut off: it was killed
                continue
            child.finished |= event["event"] == "result"
            if event["event"] == "error":
                child.error = event
        code = child.process.wait()
        if not child.finished and not self._shutting_down.is_set():
            self._lost.append(LostRank(child.rank, code, child.error or {}))
            self._loss.set()

    def _watch(self) -> None:
        self._loss.wait()
        if not self._shutting_down.wait(NOTICE_SECONDS) and (lost := self._root_cause(0.0)):
            self._shutting_down.set()
            self._end(0.0)
            self._on_loss(lost)

    def _root_cause(self, seconds: float) -> LostRank | None:
        """Whose loss drew the others with it: one that could not say why, or else who said first.

        Waits so long for a first one.
        """
        if not self._loss.wait(seconds):
            return None
        time.sleep(WAKE_SECONDS)
        return min(self._lost, key=lambda lost: lost.failed_at)

    def _end(self, seconds: float) -> None:
        """Kill those that have not ended in so many seconds: only the first process writes."""
        deadline = time.monotonic() + seconds
        for child in self._children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()


def count_cores() -> int:
    """The cores that this process may run on; where the system does not say, all there are."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _rendezvous_environment(count: int) -> dict[str, str]:
    """What the environment of the first of so many processes says; they share the cores."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), EVENT_FD: str(write), FOLLOWER: "1"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-u", "-m", "runtimes", str(job)],
        env={**os.environ, **place},
        pass_fds=(write,),
        stdin=subprocess.PIPE,
    )
    os.close(write)
    return _Child(rank, process, os.fdopen(events))
