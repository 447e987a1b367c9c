"""Commits a run's checkpoints in background: the loop goes on while they are written."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from runtimes.contract import State
from runtimes.process.events import Events
from runtimes.train.boards import Boards
from runtimes.train.checkpoint import CheckpointNotWritten, Checkpoints


@dataclass(frozen=True)
class Snapshot:
    """A run as it was after a step, to be committed."""

    step: int
    state: State  # a copy: the run goes on
    history: list[str]  # a copy
    facts: dict[str, Any]
    since: float  # perf_counter at which the loop stood still for it
    prune: bool  # whether older ones may be deleted then


class Saver:
    """Writes one checkpoint at a time; a disk that is full costs that checkpoint, not the run."""

    def __init__(self, checkpoints: Checkpoints, boards: Boards, events: Events) -> None:
        self._checkpoints, self._boards, self._events = checkpoints, boards, events
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[CheckpointNotWritten | None] | None = None

    def start(self, snapshot: Snapshot) -> None:
        """Begin to write, once the one before is written."""
        self.wait()
        blocked = time.perf_counter() - snapshot.since
        self._writing = self._thread.submit(self._write, snapshot, blocked)

    def wait(self) -> CheckpointNotWritten | None:
        """Wait until nothing is being written; why the one started last was not, if it was not."""
        return None if self._writing is None else self._writing.result()

    def close(self) -> None:
        """Wait, and end."""
        self._thread.shutdown()

    def _write(self, snapshot: Snapshot, blocked: float) -> CheckpointNotWritten | None:
        step = snapshot.step
        self._boards.flush()  # what a resume will not write again
        try:
            path, size = self._checkpoints.save(
                step, snapshot.state, snapshot.history, snapshot.facts, prune=snapshot.prune
            )
        except CheckpointNotWritten as error:
            self._events.emit("warning", message=str(error))
            return error.with_traceback(None)  # which would keep the state
        self._events.emit(
            "checkpoint",
            step=step,
            path=path,
            seconds=round(time.perf_counter() - snapshot.since, 3),
            blocked=round(blocked, 3),
            bytes=size,
        )
        return None
