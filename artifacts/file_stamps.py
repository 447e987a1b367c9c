"""What changes with a file's bytes and is known without reading them.

A remote store's own checksum, or a local file's time stamp; files in memory have neither.
"""

from __future__ import annotations

import os
from contextlib import suppress

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from artifacts.list_folder import checksum
from artifacts.remote_client_options_and_errors import file_info

#: Seconds of a tick of the clock that the kernel stamps files by, at the least.
TICK = 0.01


def time_stamp(path: str) -> str:
    """The stamp of a local file."""
    return _stamp(os.stat(path))


def _stamp(status: os.stat_result) -> str:
    return f"mtime:{status.st_mtime_ns}"


def present_stamp(fs: AbstractFileSystem, path: str) -> tuple[str | None, int | None]:
    """A file's stamp, and its size in bytes."""
    if isinstance(fs, LocalFileSystem):
        status = os.stat(path)
        return _stamp(status), status.st_size
    fs.invalidate_cache(path.rpartition("/")[0])  # a listing made earlier says what was there then
    info = file_info(fs, path)
    return checksum(info), info.get("size")


def restore_stamp(fs: AbstractFileSystem, path: str, seen: str | None, committed: str) -> None:
    """Give an intact local file its committed time stamp again, which copies of a store may lack.

    Args:
        seen: the stamp from before its bytes were checked; a file that changed since keeps its own.
    """
    if not isinstance(fs, LocalFileSystem) or seen == committed:
        return
    # Somebody else's file, or one of a bucket that was copied to a disk, is hashed at each reuse.
    with suppress(OSError, ValueError, OverflowError):
        status = os.stat(path)
        if _stamp(status) == seen:
            os.utime(path, ns=(status.st_atime_ns, int(committed.removeprefix("mtime:"))))


def distrust(fs: AbstractFileSystem, path: str) -> None:
    """Change a damaged file's time stamp, so that no reuse trusts the one it was committed with.

    A remote store's checksum cannot outlast the bytes that it is of.
    """
    if isinstance(fs, LocalFileSystem):
        with suppress(OSError):  # somebody else's file: the damage is reported all the same
            os.utime(path)
