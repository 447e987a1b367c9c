"""Bound the memory of fetched bodies that wait for decoding, in one process."""

from __future__ import annotations

import asyncio
import time

#: Bytes that a body of unknown size reserves.
UNKNOWN = 2**22


class BodyMemory:
    """Bytes of the bodies that are read or wait for decoding; for one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # bytes; one larger body is read alone
        self.used = 0
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

    async def reserve(self, size: int | None) -> float:
        """Reserve a body's bytes instead of those of an earlier attempt; the seconds waited."""
        since = time.monotonic()
        self.free()
        size = UNKNOWN if size is None else size
        await self.memory.reserve(size)
        self.size = size
        return time.monotonic() - since

    def free(self) -> None:
        """Free the bytes."""
        self.memory.free(self.size)
        self.size = 0

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()
