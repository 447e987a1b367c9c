"""Changes of a local disk that are whole at any moment, and outlive a power failure."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from artifacts.remote_client_options_and_errors import is_full


@contextmanager
def replacing(path: str, check: Callable[[], None] | None = None) -> Iterator[str]:
    """A name beside `path` to write to; it becomes `path` at the end, once its bytes are synced.

    Args:
        check: called last before the change; what it raises prevents the change.
    """
    make_folder(os.path.dirname(path))
    with _beside(path) as beside:
        yield beside
        _sync(beside)
        if check is None:
            os.replace(beside, path)
        else:
            _put(beside, path, check)
    _sync(os.path.dirname(path))


def _put(beside: str, path: str, check: Callable[[], None]) -> None:
    """Create or replace `path`. A creation that happens late, after a pause, replaces nothing."""
    check()
    with suppress(OSError):
        return os.link(beside, path)
    check()
    os.replace(beside, path)


def create(path: str, data: bytes) -> bool:
    """Create a file with its content; False if another is there. Works on NFS too."""
    with _beside(path) as beside:
        with open(beside, "xb") as stream:
            stream.write(data)
        _sync(beside)
        try:
            os.link(beside, path)
        except FileExistsError:
            if os.stat(beside).st_nlink < 2:  # NFS can lose the answer to a link that it made
                return False
    _sync(os.path.dirname(path))
    return True


def make_folder(path: str) -> None:
    """Create a folder and its parents, each synced into the one above it."""
    if os.path.isdir(path):
        return
    make_folder(os.path.dirname(path))
    with suppress(FileExistsError):
        os.mkdir(path)
    _sync(os.path.dirname(path))


def sync_tree(root: str, path: str) -> None:
    """Sync the file `root/path` that others wrote, and every folder from it up to `root`."""
    place = f"{root}/{path}"
    _sync(place)
    while len(place) > len(root):
        place = os.path.dirname(place)
        _sync(place)


@contextmanager
def _beside(path: str) -> Iterator[str]:
    beside = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        yield beside
    except OSError as error:
        if is_full(error) and error.filename is None:  # the system names no file that is open
            error.filename = path
        raise
    finally:
        with suppress(FileNotFoundError):
            os.unlink(beside)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
