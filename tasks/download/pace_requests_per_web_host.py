"""Limit connections and requests per web host, in all processes of a machine together.

A connection holds one of the host's slots. A slot is a byte of a lock file that all processes
share, so the kernel frees it if its process is killed. A rate is a minimum time for each slot.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from tasks.download.retryable_and_final_failures import BUSY, CRAWL_DELAY, NO_ANSWER, FetchFailed

#: Maximum wait that a server's Retry-After can cause, in seconds.
MAX_WAIT = 30.0
#: Maximum wait that a host's crawl delay can cause for its rows of one process, in seconds.
MAX_QUEUE = 600.0
#: Seconds between looks at slots that other processes hold.
POLL = 0.05
LARGEST_OFFSET = 2**62
TAKEN = (errno.EACCES, errno.EAGAIN)  # by another process


@dataclass
class AsyncClock:
    """Monotonic time in seconds, and a sleep on the same clock."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass
class _Queue:
    """Rows of this process that wait for a host's slots or hold them."""

    free: asyncio.Semaphore
    rows: int = 0


class HostLimits:
    """Slots of web hosts; for one event loop, and once per process and lock file.

    Args:
        file: the lock file. A process that opens it twice would lose its locks.
    """

    def __init__(self, file: Path, clock: AsyncClock | None = None) -> None:
        self.clock = clock or AsyncClock()
        self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._held: set[int] = set()  # offsets of this process
        self._queues: dict[tuple[str, int], _Queue] = {}
        self._asked_to_wait: dict[str, float] = {}  # host -> time of the next request

    @asynccontextmanager
    async def turn(
        self,
        host: str,
        connections: int,
        rate: float | None = None,
        delay: float = 0.0,
        connection: AbstractAsyncContextManager[None] | None = None,
    ) -> AsyncIterator[None]:
        """Hold one of the host's slots.

        Args:
            connections: maximum connections to the host.
            rate: maximum requests per second to the host; None: unlimited.
            delay: seconds between the starts of requests; with a delay there is one connection.
            connection: one of all hosts together, which a row that waits for its host leaves free.

        Raises:
            FetchFailed: the host asked for too long a wait, or its delay keeps the row too long.
        """
        connections = 1 if delay else connections
        key = (host, connections)
        queue = self._queues.setdefault(key, _Queue(asyncio.Semaphore(connections)))
        if queue.rows * delay > MAX_QUEUE:
            raise FetchFailed(CRAWL_DELAY)
        queue.rows += 1
        offset, until = None, 0.0
        try:
            await queue.free.acquire()
        except BaseException:
            self._leave(key)
            raise
        try:
            offset = await self._lock_slot(host, connections)
            async with self._as_asked(host, connection or nullcontext()):
                until = self.clock.now() + max(delay, connections / rate if rate else 0.0)
                yield
        except FetchFailed as failure:
            if failure.reason == NO_ANSWER:  # there was no request
                until = 0.0
            raise
        finally:
            hold = max(0.0, until - self.clock.now())
            asyncio.get_running_loop().call_later(hold, self._release, key, offset)

    def wait_for(self, host: str, seconds: float) -> None:
        """Send no request to a host for some seconds, as its Retry-After asks."""
        if seconds > 0:
            now = self.clock.now()
            self._asked_to_wait = {h: t for h, t in self._asked_to_wait.items() if t > now}
            self._asked_to_wait[host] = max(self._asked_to_wait.get(host, 0.0), now + seconds)

    @asynccontextmanager
    async def _as_asked(
        self, host: str, connection: AbstractAsyncContextManager[None]
    ) -> AsyncIterator[None]:
        """Hold a connection, from a moment at which the host asks for no wait."""
        while True:
            while (wait := self._asked_wait(host)) > 0:
                if wait > MAX_WAIT:
                    raise FetchFailed(BUSY)
                await self.clock.sleep(wait)
            async with connection:
                if self._asked_wait(host) <= 0:  # it may ask while others have the connections
                    yield
                    return

    def _asked_wait(self, host: str) -> float:
        return self._asked_to_wait.get(host, 0.0) - self.clock.now()

    async def _lock_slot(self, host: str, connections: int) -> int:
        """Offset of the locked byte of a slot that no process uses."""
        digest = int.from_bytes(hashlib.sha256(host.encode()).digest()[:8], "big")
        first = digest % LARGEST_OFFSET
        while True:
            for offset in range(first, first + connections):
                if offset not in self._held and self._lock(offset):
                    self._held.add(offset)
                    return offset
            await self.clock.sleep(POLL)

    def _lock(self, offset: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
        except OSError as error:
            return error.errno not in TAKEN  # without locks the limit is that of each process
        return True

    def _release(self, key: tuple[str, int], offset: int | None) -> None:
        if offset is not None:
            self._held.remove(offset)
            with suppress(OSError):
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, offset)
        self._queues[key].free.release()
        self._leave(key)

    def _leave(self, key: tuple[str, int]) -> None:
        self._queues[key].rows -= 1
        if not self._queues[key].rows:
            del self._queues[key]
