"""Errors of the local cache: its disk is full, or its folder cannot be written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from artifacts.remote_client_options_and_errors import is_full


class CacheUnusable(RuntimeError):
    """The local cache cannot be written; the message has the reason and the remedy."""


class CacheFull(CacheUnusable):
    """The disk of the local cache is full: retry."""


@contextmanager
def caching(folder: Path, variable: str = "KILN_CACHE") -> Iterator[None]:
    """Convert errors of a cache's disk and folder; others, as those of a network, pass through.

    Args:
        variable: the variable of the environment that names another folder.

    Raises:
        CacheFull, CacheUnusable: the cache cannot be written.
    """
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise CacheFull(
                f"no space left for the cache {folder}: free space in it, or set {variable} to a "
                "folder on another disk"
            ) from error
        if not _is_of(folder, error):
            raise
        raise CacheUnusable(
            f"the cache {folder} cannot be written ({error.strerror}): set {variable} to a "
            "writable folder"
        ) from error


def _is_of(folder: Path, error: OSError) -> bool:
    """Whether an error names a file of the folder, or a folder above, which has to be made."""
    place = Path(str(error.filename or "."))
    return place.is_absolute() and (place.is_relative_to(folder) or folder.is_relative_to(place))
