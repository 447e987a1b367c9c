"""Batches made ready by a thread, ahead of the device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType

from artifacts.clock import REAL, Clock
from runtimes.contract import StepBatch

POLL_SECONDS = 0.1
JOIN_SECONDS = 5.0


class Prefetch:
    """An iterator of batches made by a thread; `waited` is how long its reader stood idle.

    Args:
        batches: what the thread goes through.
        depth: how many are made ready at most.
        stopping: ends them early once it says so, even while the next one is long in coming.
    """

    def __init__(
        self,
        batches: Iterable[StepBatch],
        depth: int,
        stopping: Callable[[], bool],
        clock: Clock = REAL,
    ) -> None:
        self.waited = 0.0  # seconds
        self._batches, self._stopping, self._clock = batches, stopping, clock
        self._ready: queue.Queue[StepBatch | BaseException | None] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="loader", daemon=True)

    def __enter__(self) -> Prefetch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(JOIN_SECONDS)  # a read that stalls must not keep the process

    def __iter__(self) -> Iterator[StepBatch]:
        while True:
            begin = self._clock.now()
            item = self._next()
            self.waited += self._clock.now() - begin
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def _next(self) -> StepBatch | BaseException | None:
        """What comes next, or None at the end, or when it is time to stop."""
        while not self._stopping():
            try:
                return self._ready.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
        return None

    def _fill(self) -> None:
        try:
            for batch in self._batches:
                self._put(batch)
                if self._stop.is_set():
                    return
        except BaseException as error:  # raised again in the thread that reads
            self._put(error)
        else:
            self._put(None)

    def _put(self, item: StepBatch | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                return self._ready.put(item, timeout=POLL_SECONDS)
            except queue.Full:
                continue
