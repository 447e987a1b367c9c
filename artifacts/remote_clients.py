"""The packages of remote stores' clients: a new kind of store adds its own here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

#: Packages that the clients of remote stores are made of; not all their errors are an OSError.
_CLIENTS = frozenset(
    {
        "aiobotocore",
        "aiohttp",
        "botocore",
        "gcsfs",
        "google",
        "httpx",
        "httpx2",
        "huggingface_hub",
        "requests",
    }
)


class StoreRefused(OSError):
    """A remote store refused a request, and its client raised a ValueError."""


def is_of_client(error: BaseException) -> bool:
    """Whether an error is one of a remote store's client: no network, say, or no credentials."""
    if isinstance(error, StoreRefused) or _is_of_client(type(error).__module__):
        return True
    return isinstance(error, ValueError) and _is_of_client(_raised_in(error))


@contextmanager
def refusals() -> Iterator[None]:
    """Raise StoreRefused instead of a client's ValueError, which otherwise means damaged data.

    gcsfs raises ValueError for any refusal, even a 503, whose text has the word `invalid`.
    """
    try:
        yield
    except ValueError as error:
        if not is_of_client(error):
            raise
        raise StoreRefused(str(error)) from error


def _is_of_client(module: str) -> bool:
    return module.partition(".")[0] in _CLIENTS


def _raised_in(error: BaseException) -> str:
    """Name of the module that raised an error."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return "" if at is None else str(at.tb_frame.f_globals.get("__name__", ""))
