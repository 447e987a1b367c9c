"""Background writer of checkpoints: training continues while a checkpoint is committed."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from runtimes.process.events import Events
from runtimes.train.checkpoint_errors import CheckpointNotWritten
from runtimes.train.experiment_trackers import Trackers

#: Commits a checkpoint; returns its path and its size in bytes.
Save = Callable[[], tuple[str, int]]


class Saver:
    """Writes one checkpoint at a time. A failed write loses that checkpoint but not the run.

    All writers save the same checkpoints, in the same order.
    """

    def __init__(self, trackers: Trackers, events: Events) -> None:
        self._trackers = trackers
        self._events = events
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[CheckpointNotWritten | None] | None = None

    def start(self, step: int, since: float, save: Save) -> None:
        """Start the write of a step's checkpoint after the previous write has ended.

        Args:
            since: perf_counter at which the loop paused for this checkpoint.
            save: has copies of what it writes: training continues meanwhile.
        """
        self.wait()
        blocked = time.perf_counter() - since
        self._writing = self._thread.submit(self._write, step, since, blocked, save)

    def wait(self) -> CheckpointNotWritten | None:
        """Wait for the current write; the error of the last write, if it failed."""
        return None if self._writing is None else self._writing.result()

    def close(self) -> None:
        """Wait for the current write and end the thread."""
        self._thread.shutdown()

    def _write(
        self, step: int, since: float, blocked: float, save: Save
    ) -> CheckpointNotWritten | None:
        self._trackers.flush()  # a resume from this checkpoint does not repeat the points before it
        try:
            path, size = save()
        except CheckpointNotWritten as error:
            self._events.emit("warning", message=str(error))
            # Tracebacks keep the state in memory: this error's, and that of its cause.
            error.__context__ = None
            return error.with_traceback(None)
        self._events.emit(
            "checkpoint",
            step=step,
            path=path,
            seconds=round(time.perf_counter() - since, 3),
            blocked=round(blocked, 3),
            bytes=size,
        )
        return None
