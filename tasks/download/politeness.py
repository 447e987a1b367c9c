"""Politeness to web hosts: pace, robots.txt, opt-out headers, and pauses for dead hosts.

Connections and requests per web host are limited in all processes of a machine together. A
connection holds one of the host's slots. A slot is a byte of a lock file that all processes share,
so the kernel frees it if its process is killed. A rate is a minimum time for each slot.

Each host's robots.txt is read once a day, and kept for all processes of a machine (RFC 9309). Hosts
that do not answer get no requests for a while; an outage is distinguished from dead hosts. By the
header X-Robots-Tag a web host opts out of training.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import sqlite3
import time
import urllib.parse
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from multidict import MultiMapping
from protego import Protego

from tasks.download.http import BUSY, CRAWL_DELAY, NO_ANSWER, FetchFailed, is_transient
from tasks.download.rows import absolute

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

    @contextlib.asynccontextmanager
    async def turn(
        self,
        host: str,
        connections: int,
        rate: float | None = None,
        delay: float = 0.0,
        connection: contextlib.AbstractAsyncContextManager[None] | None = None,
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
        offset = None
        until = 0.0
        try:
            await queue.free.acquire()
        except BaseException:
            self._leave(key)
            raise
        try:
            offset = await self._lock_slot(host, connections)
            async with self._as_asked(host, connection or contextlib.nullcontext()):
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

    @contextlib.asynccontextmanager
    async def _as_asked(
        self, host: str, connection: contextlib.AbstractAsyncContextManager[None]
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
        digest = hashlib.sha256(host.encode()).digest()
        first = int.from_bytes(digest[:8], "big") % LARGEST_OFFSET
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
            with contextlib.suppress(OSError):
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, offset)
        self._queues[key].free.release()
        self._leave(key)

    def _leave(self, key: tuple[str, int]) -> None:
        self._queues[key].rows -= 1
        if not self._queues[key].rows:
            del self._queues[key]


MAX_BYTES = 500 * 1024  # of a robots.txt; the rest is ignored (RFC 9309, 2.5)
LONG = 2**14  # bytes of a robots.txt whose rules are matched in a thread
MAX_AGE = 24 * 3600.0  # seconds (RFC 9309, 2.4)
MAX_DELAY = 24 * 3600  # seconds between two requests


class Rules:
    """The rules of a robots.txt for one user agent."""

    def __init__(self, body: bytes, token: str) -> None:
        self.token = token
        self.is_long = len(body) > LONG  # a match takes milliseconds: other rows must not wait
        self.parsed = Protego.parse(body.decode("utf-8-sig", errors="replace"))
        rate = self.parsed.request_rate(token)
        delays = [
            self.parsed.crawl_delay(token) or 0.0,
            min(rate.seconds, MAX_DELAY) / rate.requests if rate else 0.0,  # integers of any size
        ]
        #: Seconds between the starts of two requests.
        self.delay = min(max(delays), MAX_DELAY)

    def allows(self, url: str) -> bool:
        """Whether the user agent may fetch `url`."""
        return self.parsed.can_fetch(url, self.token)


class RobotsCache:
    """The robots.txt of origins, in a SQLite file; without a file it keeps nothing."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with contextlib.suppress(sqlite3.Error), contextlib.closing(self._open()) as db, db:
            db.execute("create table if not exists robots (origin primary key, time, body)")
            db.execute("delete from robots where time < ?", (time.time() - MAX_AGE,))

    def read(self, origin: str) -> bytes | None:
        """The body of an origin's robots.txt, read within a day; empty if it has none."""
        with contextlib.suppress(sqlite3.Error, zlib.error), contextlib.closing(self._open()) as db:
            query = "select body from robots where origin = ? and time > ?"
            row = db.execute(query, (origin, time.time() - MAX_AGE)).fetchone()
            return None if row is None else zlib.decompress(row[0])
        return None

    def keep(self, origin: str, body: bytes) -> None:
        """Keep the body of an origin's robots.txt."""
        with contextlib.suppress(sqlite3.Error), contextlib.closing(self._open()) as db, db:
            row = (origin, time.time(), zlib.compress(body))
            db.execute("insert or replace into robots values (?, ?, ?)", row)

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.file, timeout=5.0)
        db.execute("pragma synchronous = off")  # what a crash loses is read again
        return db


#: Failures without any answer of the host.
SILENT = {"timeout", "name not resolved", "connection refused", "connection broken"}


class DeadHosts:
    """Counts each host's consecutive requests without an answer; for one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # requests without an answer after which a host is dead
        self._silent: Counter[str] = Counter()

    def check(self, host: str) -> None:
        """Raise FetchFailed if the host is dead."""
        if self._silent[host] >= self.limit:
            raise FetchFailed(NO_ANSWER)

    @contextlib.contextmanager
    def watch(self) -> Iterator[Callable[[str], None]]:
        """Count one fetch. It calls the yielded function with host:port before each connection.

        A fetch that fails without an answer fails at its last host: the others redirected it.

        Raises:
            FetchFailed: by that function, if the host is dead.
        """
        visited: list[str] = []

        def connects(host: str) -> None:
            self.check(host)
            visited.append(host)

        try:
            yield connects
        except FetchFailed as failure:
            if visited and failure.reason in SILENT:
                self._silent[visited.pop()] += 1
            raise
        finally:
            for host in visited:
                self._silent.pop(host, None)


def is_outage(urls: Sequence[str], reasons: Sequence[str | None], limit: float) -> bool:
    """Whether more than `limit` of the rows, and of the hosts, have transient failures.

    One dead host is therefore no outage, even if most rows name it. A crawl delay is none either:
    the next run would meet it again.

    Args:
        urls: the URLs of all rows of a shard.
        reasons: failure of each row; None for a picture.
        limit: fraction, 0 to 1, of the rows, of the hosts, and of the rows of a host.
    """
    rows = Counter(map(host_of, urls))
    failed = Counter(
        host_of(url)
        for url, reason in zip(urls, reasons, strict=True)
        if reason is not None and reason != CRAWL_DELAY and is_transient(reason)
    )
    down = [host for host, count in failed.items() if count > limit * rows[host]]
    return failed.total() > limit * len(urls) and len(down) > limit * len(rows)


def host_of(url: str, base_url: str | None = None) -> str:
    """Host and port of a URL, joined to `base_url` if there is any; empty for an invalid URL."""
    try:
        return urllib.parse.urlsplit(absolute(url, base_url)).netloc.rpartition("@")[2].lower()
    except ValueError:
        return ""


#: Directives with a colon, which other lines have behind the name of an agent.
VALUED = {"max-snippet", "max-image-preview", "max-video-preview", "unavailable_after"}


def is_opted_out(headers: MultiMapping[str], user_agent: str, directives: Collection[str]) -> bool:
    """Whether a response's X-Robots-Tag has one of the directives, such as `noai`, for the agent.

    A name and a colon before directives limit them to one agent. Source: Google's page "Robots meta
    tag, data-nosnippet, and X-Robots-Tag specifications".

    Args:
        user_agent: our token; directives for other agents do not count.
        directives: in lower case.
    """
    for value in headers.getall("X-Robots-Tag", []):
        agent = None
        for part in value.lower().split(","):
            name, colon, directive = (text.strip() for text in part.partition(":"))
            is_agent = colon and name not in VALUED and " " not in name  # a time has spaces
            if is_agent:
                agent = name
            rule = directive if is_agent else name
            if rule in directives and agent in (None, user_agent.lower()):
                return True
    return False
