"""The resized pictures of a shard, until its tar is written."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import BinaryIO


class ResizedPictures:
    """Pictures by the numbers of their rows, in one file; a file of each costs half a millisecond.

    Any thread may add one.
    """

    def __init__(self, file: Path) -> None:
        self._file: BinaryIO = file.open("w+b", buffering=0)
        self._places: dict[int, tuple[int, int]] = {}  # row -> (offset, bytes)
        self._lock = threading.Lock()

    def __enter__(self) -> ResizedPictures:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:  # a write after the close of its file could hit another one's descriptor
            self._file.close()

    def add(self, row: int, picture: bytes) -> None:
        """Append the picture of a row, instead of an earlier one.

        Raises:
            OSError: the disk is full.
            ValueError: the pictures are closed, as when a run is interrupted.
        """
        with self._lock:
            place = (self._file.seek(0, 2), len(picture))
            rest = memoryview(picture)
            while rest:  # a full disk takes a part of it first
                rest = rest[self._file.write(rest) :]
            self._places[row] = place

    def read(self, row: int) -> bytes:
        """The picture of a row. Raises KeyError if it has none."""
        offset, size = self._places[row]
        with self._lock:
            self._file.seek(offset)
            return self._file.read(size)
