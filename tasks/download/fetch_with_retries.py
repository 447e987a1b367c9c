"""Fetch the bytes of a row's picture, with retries."""

from __future__ import annotations

import random
from email.message import Message
from pathlib import Path
from typing import NamedTuple

from artifacts.clock import REAL, Clock
from artifacts.hashing import digest_bytes
from configs.download import Download
from tasks.download.dead_hosts import DeadHosts
from tasks.download.failure_reasons import NO_ANSWER, FetchFailed
from tasks.download.rows import Row, absolute
from tasks.download.safe_http_fetch import Limits, fetch
from tasks.download.sources import ServedAt

#: Maximum wait that a server's Retry-After can cause, in seconds.
MAX_WAIT = 30.0
#: img2dataset's User-Agent, so that servers treat this download as one of img2dataset.
USER_AGENT = "Mozilla/5.0 (X11; Ubuntu; Linux x86_64; rv:72.0) Gecko/20100101 Firefox/72.0"
USER_AGENT_TOKEN = " (compatible; {}; +https://github.com/rom1504/img2dataset)"


class Fetched(NamedTuple):
    """A fetched picture."""

    body: bytes
    headers: Message  # of the response
    attempts: int = 0  # requests


class Fetcher:
    """Fetches the pictures of rows, until a host is dead."""

    def __init__(self, settings: Download, served_at: ServedAt, clock: Clock = REAL) -> None:
        self.settings = settings
        self.base_url = served_at.base_url
        self.clock = clock
        self.hosts = DeadHosts(settings.max_host_failures)
        allowed = {host.lower() for host in (*settings.allow_hosts, *served_at.allow_hosts)}
        self.limits = Limits(
            settings.max_bytes,
            settings.timeout,
            frozenset(allowed),
            frozenset(settings.allow_ports),
        )
        self.token = (settings.user_agent_token or "").strip().lower() or None
        suffix = USER_AGENT_TOKEN.format(self.token) if self.token else ""
        self.headers = {"User-Agent": USER_AGENT + suffix}

    def get(self, row: Row) -> Fetched:
        """A row's picture. Raises FetchFailed, with the number of `attempts`."""
        fetched = self._read_file(row.file) if row.file else self._fetch(row)
        if row.sha256 is not None and digest_bytes(fetched.body) != row.sha256:
            raise FetchFailed("sha256 differs", attempts=fetched.attempts)
        return fetched

    def _read_file(self, file: str) -> Fetched:
        with Path(file).open("rb") as stream:
            body = stream.read(self.limits.max_bytes + 1)
        if len(body) > self.limits.max_bytes:
            raise FetchFailed("too large")
        return Fetched(body, Message())

    def _fetch(self, row: Row) -> Fetched:
        if not row.url:
            raise FetchFailed("no picture")
        try:
            url = absolute(row.url, self.base_url)
        except ValueError:
            raise FetchFailed("bad url") from None
        deadline = self.clock.now() + self.settings.deadline
        for attempt in range(self.settings.retries + 1):
            try:
                with self.hosts.watch() as connects:
                    body, headers = fetch(url, self.headers, self.limits, deadline, connects)
                return Fetched(body, headers, attempt + 1)
            except FetchFailed as failure:
                is_dead = failure.reason == NO_ANSWER
                failure.attempts = attempt if is_dead else attempt + 1
                pause = self._pause(attempt, failure)
                is_last = is_dead or attempt == self.settings.retries
                if not failure.transient or is_last or self.clock.now() + pause >= deadline:
                    raise
            self.clock.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _pause(self, attempt: int, failure: FetchFailed) -> float:
        # Jitter: without it all threads retry an overloaded server at the same moment.
        own = self.settings.backoff * 2**attempt * random.uniform(0.75, 1.25)
        return max(own, min(failure.wait, MAX_WAIT))
