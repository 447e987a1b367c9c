"""Lines of several streams in one queue, for engines whose agents are read by threads."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable


class Lines:
    """The lines of all followed streams, in the order of their arrival."""

    def __init__(self) -> None:
        self._queue = queue.SimpleQueue[str | None]()
        self._open = 0

    def follow(self, stream: Iterable[str]) -> None:
        """Read a stream to its end, in a thread of its own."""
        self._open += 1
        threading.Thread(target=self._pump, args=(stream,), daemon=True).start()

    def read(self, seconds: float) -> list[str] | None:
        """New lines, after at most `seconds`; None at the end of all streams."""
        lines = list[str]()
        end = time.monotonic() + seconds
        while self._open:
            wait = 0.0 if lines else max(0.0, end - time.monotonic())
            try:
                line = self._queue.get(timeout=wait) if wait else self._queue.get_nowait()
            except queue.Empty:
                return lines
            if line is None:
                self._open -= 1
            else:
                lines.append(line)
        return lines or None

    def _pump(self, stream: Iterable[str]) -> None:
        try:
            for line in stream:
                self._queue.put(line)
        finally:
            self._queue.put(None)
