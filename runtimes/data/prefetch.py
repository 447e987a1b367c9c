"""Prefetch: a thread prepares batches while the device computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from artifacts.filesystems import REAL, Clock

Batch = TypeVar("Batch")
POLL_SECONDS = 0.1
JOIN_SECONDS = 5.0


class Prefetch(Generic[Batch]):
    """An iterator over batches that a thread prepares. Enter it as a context manager first.

    Args:
        batches: iterated by the thread.
        depth: maximum number of prepared batches.
        stopping: ends the iteration once it returns True, even during a slow read.
        clock: source of time for `waited`.

    Attributes:
        waited: total seconds that the consumer has waited for a batch.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        depth: int,
        stopping: Callable[[], bool] = lambda: False,
        clock: Clock = REAL,
    ) -> None:
        self.waited = 0.0
        self._batches = batches
        self._stopping = stopping
        self._clock = clock
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="loader", daemon=True)

    def __enter__(self) -> Prefetch[Batch]:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(JOIN_SECONDS)  # a stalled read must not block the process's exit

    def __iter__(self) -> Iterator[Batch]:
        while True:
            begin = self._clock.now()
            item = self._next()
            self.waited += self._clock.now() - begin
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def _next(self) -> Batch | BaseException | None:
        """The next batch or the thread's error; None at the end or after a stop request."""
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
        except BaseException as error:  # the consumer's thread raises it again
            self._put(error)
        else:
            self._put(None)

    def _put(self, item: Batch | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                return self._ready.put(item, timeout=POLL_SECONDS)
            except queue.Full:
                continue
