"""Stop requests to hosts that do not answer, and distinguish dead hosts from an outage."""

from __future__ import annotations

import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tasks.download.retryable_and_final_failures import (
    CRAWL_DELAY,
    NO_ANSWER,
    FetchFailed,
    is_transient,
)
from tasks.download.row_fields_and_hash import absolute

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

    @contextmanager
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

        silent = None
        try:
            yield connects
        except FetchFailed as failure:
            silent = visited.pop() if visited and failure.reason in SILENT else None
            raise
        finally:
            self._silent.update([silent] if silent else [])
            for host in visited:
                self._silent.pop(host, None)


def is_outage(urls: Sequence[str], reasons: Sequence[str | None], limit: float) -> bool:
    """Whether more than `limit` of the rows, and of the hosts, have transient failures.

    One dead host is therefore no outage, even if most rows name it. A crawl delay is none either:
    the next run would meet it again.

    Args:
        urls: of all rows of a shard.
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
    """Host and port of a URL, joined to `base_url` if there is one; empty for an invalid one."""
    try:
        return urllib.parse.urlsplit(absolute(url, base_url)).netloc.rpartition("@")[2].lower()
    except ValueError:
        return ""
