"""Failure reasons of a fetch: a small set of strings without addresses, ports or secrets."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import time
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any

#: The reason of rows that are not requested, since their host is dead.
NO_ANSWER = "host does not answer"
#: Reasons that may pass: network trouble, overload (RFC 9110, RFC 6585, RFC 8470), server errors.
TRANSIENT = re.compile(
    "timeout|name not resolved|connection refused|connection broken|http (408|425|429|[5-9]..)|"
    + NO_ANSWER
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


@contextmanager
def as_fetch_failed() -> Iterator[None]:
    """Convert the exceptions of a fetch to FetchFailed."""
    try:
        yield
    except FetchFailed:
        raise
    except urllib.error.HTTPError as error:
        error.close()
        if 300 <= error.code < 400:
            raise FetchFailed("bad redirect") from None
        raise FetchFailed(f"http {error.code}", _retry_after(error.headers)) from None
    except urllib.error.URLError as error:
        raise FetchFailed(_reason(error.reason)) from None
    except (http.client.InvalidURL, UnicodeError):
        raise FetchFailed("bad url") from None
    except http.client.HTTPException:
        # An early close is indistinguishable from a server that does not speak HTTP.
        raise FetchFailed("connection broken") from None
    except OSError as error:
        raise FetchFailed(_reason(error)) from None
    except ValueError:
        raise FetchFailed("bad url") from None


def _reason(error: object) -> str:
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
    if isinstance(error, OSError):
        return "connection broken"
    return "refused scheme"  # a plain string: UnknownHandler, after a redirect


def _retry_after(headers: Any) -> float:
    """Seconds of a Retry-After header (RFC 9110: a number or a date); 0 if absent or invalid."""
    value = (headers.get("Retry-After") or "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return 0.0
