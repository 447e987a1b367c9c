"""Background writer of checkpoints: training continues while a checkpoint is committed."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from runtimes.contract import State, StateShapes
from runtimes.process.events import Events
from runtimes.train.checkpoint_errors import CheckpointNotWritten
from runtimes.train.experiment_trackers import Trackers
from runtimes.train.write_and_prune_checkpoints import Checkpoints


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint before it is committed."""

    step: int
    state: State  # a copy of the arrays that this rank writes: training continues meanwhile
    shapes: StateShapes  # of the arrays of all ranks
    history: list[str]  # a copy
    facts: dict[str, Any]
    since: float  # perf_counter at which the loop paused for this checkpoint
    best_first: list[int]  # steps of checkpoints, the best first
    prune: bool  # whether older checkpoints may be deleted afterwards


class Saver:
    """Writes one checkpoint at a time. A failed write loses that checkpoint but not the run.

    All writers save the same checkpoints, in the same order.
    """

    def __init__(self, checkpoints: Checkpoints, trackers: Trackers, events: Events) -> None:
        self._checkpoints = checkpoints
        self._trackers = trackers
        self._events = events
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[CheckpointNotWritten | None] | None = None

    def start(self, snapshot: Snapshot) -> None:
        """Start the write after the previous write has ended."""
        self.wait()
        blocked = time.perf_counter() - snapshot.since
        self._writing = self._thread.submit(self._write, snapshot, blocked)

    def wait(self) -> CheckpointNotWritten | None:
        """Wait for the current write; the error of the last write, if it failed."""
        return None if self._writing is None else self._writing.result()

    def close(self) -> None:
        """Wait for the current write and end the thread."""
        self._thread.shutdown()

    def _write(self, snapshot: Snapshot, blocked: float) -> CheckpointNotWritten | None:
        step = snapshot.step
        self._trackers.flush()  # a resume from this checkpoint does not repeat the points before it
        try:
            path, size = self._checkpoints.save(
                step,
                snapshot.state,
                snapshot.history,
                snapshot.facts,
                shapes=snapshot.shapes,
                best_first=snapshot.best_first,
                prune=snapshot.prune,
            )
        except CheckpointNotWritten as error:
            self._events.emit("warning", message=str(error))
            return error.with_traceback(None)  # the traceback would keep the state in memory
        self._events.emit(
            "checkpoint",
            step=step,
            path=path,
            seconds=round(time.perf_counter() - snapshot.since, 3),
            blocked=round(blocked, 3),
            bytes=size,
        )
        return None
