"""Fetch the bytes of a shard's rows with retries, for img2dataset's downloader."""

from __future__ import annotations

import random
import threading
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from email.message import Message
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.response import addinfourl

from artifacts.clock import REAL, Clock
from artifacts.keys import digest_bytes
from configs.schema import Download
from tasks.download.check_picture import apply_orientation, check_picture
from tasks.download.failures import FetchFailed
from tasks.download.rows import Row, absolute
from tasks.download.safe_http import Limits, fetch
from tasks.download.sources import ServedAt

#: Scheme of the URLs by which img2dataset requests the rows of a shard.
SCHEME = "kilnrow"
#: Maximum wait that a server's Retry-After can cause, in seconds.
MAX_WAIT = 30.0
USER_AGENT = "Mozilla/5.0 (compatible; kilnworks)"


class Fetcher:
    """Fetches the rows of one shard and records the failure of each row."""

    def __init__(
        self, rows: Sequence[Row], settings: Download, served_at: ServedAt, clock: Clock = REAL
    ) -> None:
        self.rows = rows
        self.clock = clock
        self.settings = settings
        self.base_url = served_at.base_url
        allowed = {host.lower() for host in (*settings.allow_hosts, *served_at.allow_hosts)}
        self.limits = Limits(settings.max_bytes, settings.timeout, frozenset(allowed))
        self.failures: dict[int, FetchFailed] = {}  # by row number

    def get(self, number: int, headers: dict[str, str]) -> tuple[bytes, Message]:
        """Body and response headers of row `number`.

        Raises:
            FetchFailed: also recorded in `failures`.
        """
        try:
            row = self.rows[number]
            body, answer = self._read_file(row) if row.file else self._fetch(row, headers)
            if row.sha256 is not None and digest_bytes(body) != row.sha256:
                raise FetchFailed("sha256 differs")
            check_picture(body, self.settings.max_pixels)
            return apply_orientation(body), answer
        except FetchFailed as failure:
            self.failures[number] = failure
            raise

    def _read_file(self, row: Row) -> tuple[bytes, Message]:
        with Path(row.file or "").open("rb") as stream:
            body = stream.read(self.limits.max_bytes + 1)
        if len(body) > self.limits.max_bytes:
            raise FetchFailed("too large")
        return body, Message()

    def _fetch(self, row: Row, headers: dict[str, str]) -> tuple[bytes, Message]:
        if not row.url:
            raise FetchFailed("no picture")
        try:
            url = absolute(row.url, self.base_url)
        except ValueError:
            raise FetchFailed("bad url") from None
        deadline = self.clock.now() + self.settings.deadline
        for attempt in range(self.settings.retries + 1):
            try:
                return fetch(url, headers, self.limits, deadline)
            except FetchFailed as failure:
                pause = self._pause(attempt, failure)
                is_last = attempt == self.settings.retries
                if not failure.transient or is_last or self.clock.now() + pause >= deadline:
                    raise
            self.clock.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _pause(self, attempt: int, failure: FetchFailed) -> float:
        # Jitter: without it all threads retry an overloaded server at the same moment.
        own = self.settings.backoff * 2**attempt * random.uniform(0.75, 1.25)
        return max(own, min(failure.wait, MAX_WAIT))


@contextmanager
def registered_urls(fetcher: Fetcher) -> Iterator[list[str]]:
    """One URL per row, through which `urllib.request.urlopen` returns the fetcher's rows.

    img2dataset calls urllib, whose opener is global to the process. The opener gets one additional
    scheme, and the host part of a URL selects the fetcher. Concurrent shards and other users of
    urllib are unaffected.
    """
    _install()
    token = uuid.uuid4().hex
    _fetchers[token] = fetcher
    try:
        yield [f"{SCHEME}://{token}/{number}" for number in range(len(fetcher.rows))]
    finally:
        del _fetchers[token]


_fetchers: dict[str, Fetcher] = {}
_installing = threading.Lock()


class _RowHandler(urllib.request.BaseHandler):
    def kilnrow_open(self, request: urllib.request.Request) -> addinfourl:
        number = int(request.selector.lstrip("/"))
        headers = {"User-Agent": request.get_header("User-agent") or USER_AGENT}
        body, answer = _fetchers[str(request.host)].get(number, headers)
        return addinfourl(BytesIO(body), answer, request.full_url, 200)


def _install() -> None:
    with _installing:
        opener: Any = getattr(urllib.request, "_opener", None) or urllib.request.build_opener()
        if not any(isinstance(handler, _RowHandler) for handler in opener.handlers):
            opener.add_handler(_RowHandler())
            urllib.request.install_opener(opener)
