"""Bound the memory of fetched bodies that wait for decoding, in one process."""

from __future__ import annotations

import asyncio
import time

#: Bytes that a body of unknown size reserves.
UNKNOWN = 2**22


class BodyMemory:
    """Bytes of the bodies that are read or wait for decoding; for one event loop."""

    def __init__(self, limit: int, unknown: int = UNKNOWN) -> None:
        self.limit = limit  # bytes; one larger body is read alone
        self.unknown = unknown  # bytes that a body of unknown size reserves
        self.used = 0
        self.growth = asyncio.Lock()  # of one body at a time, which may exceed the limit
        self._turn = asyncio.Lock()  # one after another: small bodies do not overtake
        self._freed = asyncio.Event()

    async def reserve(self, size: int) -> None:
        """Wait until `size` bytes are free."""
        async with self._turn:
            while self.used and self.used + size > self.limit:
                self._freed.clear()
                await self._freed.wait()
            self.used += size

    def free(self, size: int) -> None:
        """Free `size` bytes."""
        self.used -= size
        self._freed.set()


class Room:
    """Memory for one row's body; the context ends when the body is decoded."""

    def __init__(self, memory: BodyMemory) -> None:
        self.memory = memory
        self.size = 0
        self.is_grown = False

    async def reserve(self, size: int | None) -> float:
        """Reserve a body's bytes instead of those of an earlier attempt; the seconds waited."""
        since = time.monotonic()
        self.free()
        size = self.memory.unknown if size is None else size
        await self.memory.reserve(size)
        self.size = size
        return time.monotonic() - since

    async def grow(self, size: int) -> float:
        """Reserve `size` bytes in all for a body that is being read; the seconds waited.

        It does not wait for free memory: bodies that do so with a part of theirs wait in a ring.
        """
        since = time.monotonic()
        await self.memory.growth.acquire()
        self.is_grown = True
        self.memory.used += size - self.size
        self.size = size
        return time.monotonic() - since

    def free(self) -> None:
        """Free the bytes."""
        self.memory.free(self.size)
        self.size = 0
        if self.is_grown:
            self.memory.growth.release()
            self.is_grown = False

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()
