"""Fetch the bytes of a shard's rows with retries, for img2dataset's downloader."""

from __future__ import annotations

import random
import threading
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from email.message import Message
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.response import addinfourl

from artifacts.clock import REAL, Clock
from artifacts.keys import digest_bytes
from configs.schema import Download
from tasks.download.failures import FetchFailed
from tasks.download.rows import Row, absolute
from tasks.download.safe_http import Limits, fetch
from tasks.download.sources import ServedAt

#: Scheme of the URLs by which img2dataset requests the rows of a shard.
SCHEME = "kilnrow"
#: Accepted formats. The list keeps hostile bytes away from Pillow's rarer decoders.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
ORIENTATION = 0x0112  # EXIF tag; 1 is upright
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
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


def check_picture(body: bytes, max_pixels: int) -> None:
    """Raise FetchFailed unless the header describes a picture of at most `max_pixels` pixels."""
    from PIL import Image

    try:
        with Image.open(BytesIO(body), formats=_known_formats()) as image:
            width, height = image.size
    except Image.DecompressionBombError:
        raise FetchFailed("too many pixels") from None
    except Exception:  # a parser of hostile bytes may raise any type
        raise FetchFailed("not an image") from None
    if width * height > max_pixels:
        raise FetchFailed("too many pixels")


def apply_orientation(body: bytes) -> bytes:
    """The picture with its EXIF orientation applied: PNG bytes, or `body` if it is upright.

    img2dataset ignores and drops the EXIF tag.

    Raises:
        FetchFailed: the picture cannot be decoded.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(BytesIO(body), formats=_known_formats()) as image:
            try:
                orientation = image.getexif().get(ORIENTATION, 1)
            except Exception:  # a damaged tag does not make the picture unusable
                orientation = 1
            if orientation not in range(2, 9):
                return body
            rotated = ImageOps.exif_transpose(image)
            if rotated.mode not in PNG_MODES:
                rotated = rotated.convert("RGB")
            buffer = BytesIO()
            rotated.save(buffer, "PNG", compress_level=0)  # decoded again at once
            return buffer.getvalue()
    except Exception:  # any type, as in `check_picture`
        raise FetchFailed("not an image") from None


@cache
def _known_formats() -> tuple[str, ...]:
    """The FORMATS that this build of Pillow supports."""
    from PIL import Image

    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


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
