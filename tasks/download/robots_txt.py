"""Read each host's robots.txt once a day, and keep it for all processes of a machine (RFC 9309)."""

from __future__ import annotations

import sqlite3
import time
import zlib
from contextlib import closing, suppress
from pathlib import Path

from protego import Protego

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
    """The robots.txt of origins, in a SQLite file; without one it keeps nothing."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with suppress(sqlite3.Error), closing(self._open()) as db, db:
            db.execute("create table if not exists robots (origin primary key, time, body)")
            db.execute("delete from robots where time < ?", (time.time() - MAX_AGE,))

    def read(self, origin: str) -> bytes | None:
        """The body of an origin's robots.txt, read within a day; empty if it has none."""
        with suppress(sqlite3.Error, zlib.error), closing(self._open()) as db:
            query = "select body from robots where origin = ? and time > ?"
            found = db.execute(query, (origin, time.time() - MAX_AGE)).fetchone()
            return None if found is None else zlib.decompress(found[0])
        return None

    def keep(self, origin: str, body: bytes) -> None:
        """Keep the body of an origin's robots.txt."""
        with suppress(sqlite3.Error), closing(self._open()) as db, db:
            row = (origin, time.time(), zlib.compress(body))
            db.execute("insert or replace into robots values (?, ?, ?)", row)

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.file, timeout=5.0)
        db.execute("pragma synchronous = off")  # what a crash loses is read again
        return db
