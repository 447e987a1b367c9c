"""Why a fetch gave no picture, in few and stable words that hold no address, port or secret."""

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

#: Statuses besides 5xx that may go away: request timeout, too early, too many requests.
PASSING = {408, 425, 429}


class FetchFailed(Exception):
    """A fetch that gave no picture, in one of few stable words that name no host."""

    def __init__(self, reason: str, *, transient: bool = False, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.transient = transient  # another try may succeed
        self.wait = wait  # seconds that the server asks us to wait first


@contextmanager
def in_words() -> Iterator[None]:
    """Turn what a fetch may raise into one of the stable reasons."""
    try:
        yield
    except FetchFailed:
        raise
    except urllib.error.HTTPError as error:
        error.close()
        passing = error.code in PASSING or error.code >= 500
        if 300 <= error.code < 400:
            raise FetchFailed("bad redirect") from None
        wait = _retry_after(error.headers)
        raise FetchFailed(f"http {error.code}", transient=passing, wait=wait) from None
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
        passing = error.errno == socket.EAI_AGAIN
        return FetchFailed("name not resolved" if passing else "unknown host", transient=passing)
    if isinstance(error, ssl.SSLCertVerificationError):
        return FetchFailed("bad certificate")
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return FetchFailed("tls failed")
    if isinstance(error, ConnectionRefusedError):
        return FetchFailed("connection refused", transient=True)
    if isinstance(error, OSError):
        return FetchFailed("connection broken", transient=True)
    return FetchFailed("refused scheme")  # UnknownHandler's words, about a redirect


def _from_protocol(error: Exception) -> FetchFailed:
    if isinstance(error, http.client.InvalidURL | UnicodeError):
        return FetchFailed("bad url")
    # A server that closes early, and one that talks no HTTP, look alike here.
    return FetchFailed("connection broken", transient=True)


def _retry_after(headers: Any) -> float:
    """Seconds of a Retry-After header, which gives seconds or a date."""
    value = (headers.get("Retry-After") or "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return 0.0
