"""Fetch the bytes of a row's picture: as robots.txt permits, at each host's pace, with retries.

All downloads of a process run in one event loop, and all its shards share what `Shared` names.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from multidict import MultiDict, MultiMapping

from artifacts.errors import caching
from artifacts.models import cache_folder
from artifacts.records import digest_bytes
from configs.settings.data import Download
from runtimes.detect_hardware import collect_garbage_rarely, raise_open_file_limit
from runtimes.process.launcher import count_cores
from tasks.download import http, politeness
from tasks.download.lists import ServedAt
from tasks.download.rows import Row, absolute

#: Bytes of the bodies that a process reads or keeps for decoding.
BODIES = 2**28
#: Files of a process beside its connections: for Python, Beam, the store and temporary files.
OTHER_FILES = 64
#: Files of a connection: its socket, a socket for another address, and its wait for the host.
FILES = 3
log = logging.getLogger("kiln")
T = TypeVar("T")
_creation = threading.Lock()


@dataclass(frozen=True)
class Shared:
    """What all shards of a process share."""

    connections: asyncio.Semaphore  # of all hosts
    bodies: http.BodyMemory
    decoders: ThreadPoolExecutor  # decoding releases the interpreter lock
    hosts: politeness.HostLimits
    robots: politeness.RobotsCache


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, which runs in the loop beside those of other threads."""
    with _creation:
        loop = _loop()
    running = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return running.result()
    except BaseException:
        running.cancel()
        raise


def shared(max_connections: int) -> Shared:
    """The shared objects of this process, for a limit of connections."""
    folder = cache_folder()
    with caching(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _creation:
        return Shared(_connections(max_connections), *_of_process(), *_of_folder(folder))


@cache
def _loop() -> asyncio.AbstractEventLoop:
    collect_garbage_rarely()  # the searches took half of the loop's time
    gc.collect()
    gc.freeze()  # the search after each shard skips what imports made
    atexit.register(gc.unfreeze)  # DuckDB's bindings would list what is left as leaks
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="kiln-download", daemon=True).start()
    return loop


@cache
def _connections(limit: int) -> asyncio.Semaphore:
    files = raise_open_file_limit()
    most = max(1, (files - OTHER_FILES) // FILES)
    if most < limit:
        log.warning(
            "download: %d connections instead of download.max_connections, %d: this process may "
            "open %d files; raise the limit (`ulimit -n`)",
            *(most, limit, files),
        )
    return asyncio.Semaphore(min(limit, most))


@cache
def _of_process() -> tuple[http.BodyMemory, ThreadPoolExecutor]:
    threads = count_cores() + 1  # one of them waits for the interpreter lock
    decoders = ThreadPoolExecutor(threads, thread_name_prefix="kiln-decode")
    return http.BodyMemory(BODIES), decoders


@cache
def _of_folder(folder: Path) -> tuple[politeness.HostLimits, politeness.RobotsCache]:
    robots = politeness.RobotsCache(folder / "robots.sqlite")
    return politeness.HostLimits(folder / "hosts.lock"), robots


#: Product token (RFC 9309) of this program, unless the recipe sets a token.
TOKEN = "kilnworks"
#: Seconds before a request that this machine had no descriptor for, say, is tried again.
SHORTAGE_PAUSE = 0.5


class Fetched(NamedTuple):
    """A fetched picture."""

    body: bytes
    headers: MultiMapping[str]  # of the response
    attempts: int = 0  # requests


class Fetcher:
    """Fetches the pictures of a shard's rows; an asynchronous context manager.

    Hosts of `served_at` are this stage's own server: they have no robots.txt and no limits.
    """

    def __init__(
        self, settings: Download, served_at: ServedAt, clock: politeness.AsyncClock | None = None
    ) -> None:
        self.settings = settings
        self.base_url = served_at.base_url
        self.clock = clock or politeness.AsyncClock()
        self.shared: Shared = shared(settings.max_connections)
        self.dead_hosts = politeness.DeadHosts(settings.max_host_failures)
        self.own_hosts = {host.lower() for host in served_at.allow_hosts}
        self.token = (settings.user_agent_token or TOKEN).strip().lower()
        headers = {"User-Agent": user_agent(settings)}
        self.client = http.SafeHttpClient(settings, self.own_hosts, headers)
        self._rules: dict[str, asyncio.Task[politeness.Rules]] = {}
        self._rows: Counter[str] = Counter()  # of the shard that have no outcome yet, by host
        self._requests: Counter[str] = Counter()  # of them that are being answered, by host

    async def __aenter__(self) -> Fetcher:
        await self.client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._rules.values():
            task.cancel()
        await asyncio.gather(*self._rules.values(), return_exceptions=True)
        await self.client.__aexit__()

    def expect(self, rows: Iterable[Row]) -> None:
        """Keep connections to the hosts of rows that `get` will fetch."""
        self._rows.update(politeness.host_of(row.url, self.base_url) for row in rows)

    async def get(self, row: Row, room: http.Room) -> Fetched:
        """A row's picture. Raises FetchFailed, with the number of `attempts`.

        Args:
            room: memory for the picture.
        """
        read = self._read_file(Path(row.file), room) if row.file else self._fetch(row, room)
        fetched = await read
        if row.sha256 is not None and digest_bytes(fetched.body) != row.sha256:
            raise http.FetchFailed("sha256 differs", attempts=fetched.attempts)
        return fetched

    async def _read_file(self, file: Path, room: http.Room) -> Fetched:
        size = file.stat().st_size
        if size > self.settings.max_bytes:
            raise http.FetchFailed("too large")
        await room.reserve(size)
        return Fetched(await asyncio.to_thread(file.read_bytes), MultiDict())

    async def _fetch(self, row: Row, room: http.Room) -> Fetched:
        if not row.url:
            raise http.FetchFailed("no picture")
        try:
            url = absolute(row.url, self.base_url)
        except ValueError:
            raise http.FetchFailed("bad url") from None
        try:
            return await self._retried(partial(self._request, url, room=room))
        finally:
            self._rows[politeness.host_of(url)] -= 1

    async def _retried(
        self, request: Callable[[http.Deadline], Awaitable[tuple[bytes, MultiMapping[str]]]]
    ) -> Fetched:
        deadline = http.Deadline(self.clock.now() + self.settings.deadline)
        for attempt in range(self.settings.retries + 1):
            try:
                body, headers = await self._when_able(partial(request, deadline), deadline)
                return Fetched(body, headers, attempt + 1)
            except http.FetchFailed as failure:
                is_requested = failure.reason not in http.NOT_REQUESTED
                failure.attempts = attempt + is_requested
                # Jitter: without it all rows retry an overloaded server at the same moment.
                own = self.settings.backoff * 2**attempt * random.uniform(0.75, 1.25)
                pause = max(own, failure.wait)
                is_last = not is_requested or attempt == self.settings.retries
                is_last |= failure.wait > politeness.MAX_WAIT
                if not failure.transient or is_last or self.clock.now() + pause >= deadline.at:
                    raise
            await self.clock.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    async def _when_able(self, request: Callable[[], Awaitable[T]], deadline: http.Deadline) -> T:
        """The answer of a request, tried again while this machine lacks what it needs.

        Raises the error of the machine at the deadline.
        """
        pause = SHORTAGE_PAUSE
        while True:
            try:
                return await request()
            except (OSError, MemoryError):
                if self.clock.now() + pause >= deadline.at:
                    raise
            await self.clock.sleep(pause * random.uniform(0.75, 1.25))
            pause *= 2

    async def _request(
        self, url: str, deadline: http.Deadline, *, room: http.Room | None
    ) -> tuple[bytes, MultiMapping[str]]:
        """One request of a picture and its redirects; without `room`, of a robots.txt."""
        is_robots = room is None
        visited: list[http.Target] = []
        with self.dead_hosts.watch() as connects:

            @asynccontextmanager
            async def admit(target: http.Target, deadline: http.Deadline) -> AsyncIterator[bool]:
                visited.append(target)
                since = self.clock.now()
                async with self._turn(target, is_robots) as is_used_again:
                    connects(target.name)
                    deadline.at += self.clock.now() - since
                    yield is_used_again

            most = politeness.MAX_BYTES if is_robots else None
            try:
                return await self.client.fetch(url, deadline, room=room, admit=admit, truncate=most)
            except (http.FetchFailed, OSError, MemoryError) as failure:
                if room is not None:
                    room.free()  # before the pause: rows that wait for memory hold connections
                if visited and isinstance(failure, http.FetchFailed):
                    self.shared.hosts.wait_for(visited[-1].host, failure.wait)
                raise

    @asynccontextmanager
    async def _turn(self, target: http.Target, is_robots: bool) -> AsyncIterator[bool]:
        """The turn of a request at its host, with a connection, if its robots.txt permits it.

        It yields whether the connection is kept: whether more rows of the host wait for a turn.
        """
        connection = self.shared.connections
        if {target.host, target.name} & self.own_hosts:
            async with connection:
                yield True
            return
        self.dead_hosts.check(target.name)
        delay = 0.0
        if self.settings.robots_txt and not is_robots:
            rules = await self._rules_of(target.origin)
            allows = partial(rules.allows, target.url)
            if not (await asyncio.to_thread(allows) if rules.is_long else allows()):
                raise http.FetchFailed(http.DISALLOWED)
            delay = rules.delay
        limits = self.settings.max_connections_per_host, self.settings.max_requests_per_host
        async with self.shared.hosts.turn(target.host, *limits, delay, connection):
            host = politeness.host_of(target.url)
            self._requests[host] += not is_robots
            try:
                yield self._rows[host] > self._requests[host]
            finally:
                self._requests[host] -= not is_robots

    async def _rules_of(self, origin: str) -> politeness.Rules:
        """The rules of an origin, read once per shard. Raises FetchFailed."""
        if origin not in self._rules:
            self._rules[origin] = asyncio.create_task(self._read_rules(origin))
        return await asyncio.shield(self._rules[origin])

    async def _read_rules(self, origin: str) -> politeness.Rules:
        async with self.shared.hosts.turn(f"{origin}/robots.txt", 1):  # one process reads it
            kept = await asyncio.to_thread(self.shared.robots.read, origin)
            body = await self._read_robots(f"{origin}/robots.txt") if kept is None else kept
            try:
                rules = await asyncio.to_thread(politeness.Rules, body, self.token)
            except Exception:  # of the parser: one host's file does not end the download
                raise http.FetchFailed(http.NO_ROBOTS) from None
            if kept is None:
                await asyncio.to_thread(self.shared.robots.keep, origin, body)
        return rules

    async def _read_robots(self, url: str) -> bytes:
        """The body of a robots.txt; empty if there is none (RFC 9309, 2.3.1)."""
        try:
            return (await self._retried(partial(self._request, url, room=None))).body
        except http.FetchFailed as failure:
            is_answer = failure.reason.startswith("http ") or failure.reason == "bad redirect"
            if is_answer and not failure.transient:
                return b""
            if is_answer or failure.reason == http.BAD_ENCODING:
                raise http.FetchFailed(http.NO_ROBOTS) from None
            reason = http.NO_ANSWER if failure.reason in politeness.SILENT else failure.reason
            raise http.FetchFailed(reason) from None


def user_agent(settings: Download) -> str:
    """The User-Agent header: program, version, and the recipe's contact."""
    contact = f"; +{settings.contact}" if settings.contact else ""
    token = settings.user_agent_token or TOKEN
    return f"Mozilla/5.0 (compatible; {token}/{version('kilnworks')}{contact})"
