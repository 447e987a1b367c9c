"""Bound the memory of decoding: the pixels that all threads of a process decode at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Memory that img2dataset needs at most, for alpha in float64.
BYTES_PER_PIXEL = 79


class PixelBudget:
    """Pixels of the pictures that are being decoded, in all threads."""

    def __init__(self) -> None:
        self.pixels = 0
        self._turn = threading.Lock()
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, pixels: int, limit: int) -> Iterator[None]:
        """Reserve `pixels`, at most `limit`, once the sum of all threads is within `limit`."""
        with self._turn, self._changed:  # one turn after another: small ones do not overtake
            self._changed.wait_for(lambda: self.pixels + pixels <= limit)
            self.pixels += pixels
        try:
            yield
        finally:
            with self._changed:
                self.pixels -= pixels
                self._changed.notify_all()


#: The budget of this process.
DECODING = PixelBudget()
