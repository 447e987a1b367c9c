"""The packages of remote stores' clients: a new kind of store adds its own here."""

from __future__ import annotations

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


def is_of_client(error: BaseException) -> bool:
    """Whether an error is one of a remote store's client: no network, say, or no credentials."""
    return type(error).__module__.partition(".")[0] in _CLIENTS
