"""Fetch files that will be needed, in background threads that block no exit of the process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

#: Files that are fetched at the same time.
THREADS = 4
log = logging.getLogger("kiln")


class ReadAhead:
    """Calls `fetch(number)` in daemon threads, for the numbers that were asked for last.

    An error is logged only: who needs the file fetches it again, and raises.
    """

    def __init__(self, fetch: Callable[[int], None]) -> None:
        self._fetch = fetch
        self._numbers: list[int] = []
        self._changed = threading.Condition()
        self._closed = False
        for number in range(THREADS):
            threading.Thread(target=self._run, name=f"read-ahead-{number}", daemon=True).start()

    def replace(self, numbers: Iterable[int]) -> None:
        """Fetch these in order, and none of the earlier ones that are still waiting."""
        with self._changed:
            self._numbers = list(numbers)
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads once they have fetched what they are at."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (number := self._next()) is not None:
            try:
                self._fetch(number)
            except Exception as error:
                log.debug("shard %d was not read ahead: %s", number, error)

    def _next(self) -> int | None:
        """The next number; None once this is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._numbers or self._closed)
            return None if self._closed else self._numbers.pop(0)
