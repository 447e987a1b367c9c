"""Failure reasons of a fetch: a small set of strings without addresses, ports or secrets."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any

#: Transient HTTP statuses below 500: request timeout, too early, too many requests.
TRANSIENT_STATUS = {408, 425, 429}


class FetchFailed(Exception):
    """A fetch failed. `reason` is one of a small set of strings and names no host."""

    def __init__(self, reason: str, *, transient: bool = False, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.transient = transient  # a retry may succeed
        self.wait = wait  # seconds to wait before a retry, as the server requests


@contextmanager
def as_fetch_failed() -> Iterator[None]:
    """Convert the exceptions of a fetch to FetchFailed."""
    try:
        yield
    except FetchFailed:
        raise
    except urllib.error.HTTPError as error:
        error.close()
        transient = error.code in TRANSIENT_STATUS or error.code >= 500
        if 300 <= error.code < 400:
            raise FetchFailed("bad redirect") from None
        wait = _retry_after(error.headers)
        raise FetchFailed(f"http {error.code}", transient=transient, wait=wait) from None
    except urllib.error.URLError as error:
        raise _from_os(error.reason) from None
    except (http.client.HTTPException, UnicodeError) as error:
        raise _from_protocol(error) from None
    except OSError as error:
        raise _from_os(error) from None
    except ValueError:
        raise FetchFailed("bad url") from None


def _from_os(error: object) -> FetchFailed:
    if isinstance(error, TimeoutError):
        return FetchFailed("timeout", transient=True)
    if isinstance(error, socket.gaierror):
        transient = error.errno == socket.EAI_AGAIN
        return FetchFailed(
            "name not resolved" if transient else "unknown host", transient=transient
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return FetchFailed("bad certificate")
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return FetchFailed("tls failed")
    if isinstance(error, ConnectionRefusedError):
        return FetchFailed("connection refused", transient=True)
    if isinstance(error, OSError):
        return FetchFailed("connection broken", transient=True)
    return FetchFailed("refused scheme")  # a plain string: UnknownHandler, after a redirect


def _from_protocol(error: Exception) -> FetchFailed:
    if isinstance(error, http.client.InvalidURL | UnicodeError):
        return FetchFailed("bad url")
    # An early close is indistinguishable from a server that does not speak HTTP.
    return FetchFailed("connection broken", transient=True)


def _retry_after(headers: Any) -> float:
    """Seconds of a Retry-After header (RFC 9110: a number or a date); 0 if absent or invalid."""
    value = (headers.get("Retry-After") or "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return 0.0
