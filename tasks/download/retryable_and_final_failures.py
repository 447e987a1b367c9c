"""Failure reasons of a fetch: a small set of strings without addresses, ports or secrets."""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime

import aiohttp

from artifacts.remote_stores import is_full, shortage

#: Reasons of rows that are not requested: their host is dead, or asks for a long wait.
NO_ANSWER, BUSY = "host does not answer", "host asks to wait"
#: The host's crawl delay keeps the row for too long: no outage, its other rows are fetched.
CRAWL_DELAY = "crawl delay too long"
#: Its robots.txt excludes the URL, or cannot be read for now (RFC 9309).
DISALLOWED, NO_ROBOTS = "robots.txt disallows", "robots.txt unavailable"
#: The body has an encoding other than gzip and deflate, or is damaged.
BAD_ENCODING = "bad content encoding"
NOT_REQUESTED = {NO_ANSWER, BUSY, CRAWL_DELAY, DISALLOWED, NO_ROBOTS}
#: Reasons that may pass: network trouble, overload (RFC 9110, RFC 6585, RFC 8470), server errors.
TRANSIENT = re.compile(
    "timeout|name not resolved|connection refused|connection broken|http (408|425|429|[5-9]..)|"
    + "|".join(map(re.escape, (NO_ANSWER, BUSY, CRAWL_DELAY, NO_ROBOTS)))
)


class FetchFailed(Exception):
    """A fetch failed. `reason` is one of a small set of strings and names no host."""

    def __init__(self, reason: str, wait: float = 0.0, attempts: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait = wait  # seconds to wait before a retry, as the server requests
        self.attempts = attempts  # requests of the row so far

    @property
    def transient(self) -> bool:
        """Whether a retry may succeed."""
        return is_transient(self.reason)


def is_transient(reason: str) -> bool:
    """Whether a row that failed for `reason` may succeed later."""
    return TRANSIENT.fullmatch(reason) is not None


class RefusedAddress(OSError):
    """An address or a port is not permitted; its text is the reason."""


@contextmanager
def as_fetch_failed() -> Iterator[None]:
    """Convert the exceptions of a fetch to FetchFailed, a new one: requests may share errors.

    Raises OSError for what this machine lacks: another row would fail alike.
    """
    try:
        yield
    except FetchFailed as failure:
        raise FetchFailed(failure.reason, failure.wait, failure.attempts) from None
    except (aiohttp.InvalidURL, UnicodeError):
        raise FetchFailed("bad url") from None
    except aiohttp.ClientConnectorCertificateError as error:
        raise FetchFailed(_reason(error.certificate_error)) from None
    except OSError as error:
        cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        if is_of_machine(cause):
            raise cause from None
        raise FetchFailed(_reason(cause)) from None
    except aiohttp.ClientError:
        # An early close is indistinguishable from a server that does not speak HTTP.
        raise FetchFailed("connection broken") from None
    except ValueError:
        raise FetchFailed("bad url") from None


def is_of_machine(error: OSError) -> bool:
    """Whether this machine lacks what a fetch needs: descriptors, ports, memory or disk."""
    return shortage(error) is not None or is_full(error)


def status_failure(status: int, headers: Mapping[str, str]) -> FetchFailed:
    """The failure of a response without a picture."""
    if 300 <= status < 400:
        return FetchFailed("bad redirect")
    return FetchFailed(f"http {status}", _retry_after(headers))


def _reason(error: Exception) -> str:
    if isinstance(error, RefusedAddress):
        return str(error)
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, socket.gaierror):
        return "name not resolved" if error.errno == socket.EAI_AGAIN else "unknown host"
    if isinstance(error, ssl.SSLCertVerificationError):
        return "bad certificate"
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return "tls failed"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return "connection broken"


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds of a Retry-After header (RFC 9110: a number or a date); 0 if absent or invalid."""
    value = (headers.get("Retry-After") or "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return 0.0
