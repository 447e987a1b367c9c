"""What a folder holds, on any filesystem: an error is never taken for an absence.

fsspec's `exists`, `glob`, `find` and `walk` leave out what they cannot read.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

Entry = dict[str, Any]  # as fsspec describes a file or a folder


def entries(fs: AbstractFileSystem, path: str) -> list[Entry]:
    """What a folder holds; nothing if there is no such folder. Raises as the filesystem does."""
    folder = str(fs._strip_protocol(path)).rstrip("/")  # as its entries are named
    try:
        found = fs.ls(folder, detail=True)
    except FileNotFoundError:
        return []
    # A bucket lists a folder's own marker too, and every filesystem a file as itself.
    return [entry for entry in found if entry["name"].rstrip("/") != folder]


def subfolders(fs: AbstractFileSystem, path: str) -> list[str]:
    """Names of the folders in a folder, and of links to folders. Raises as `entries`."""
    return sorted(name_of(e) for e in entries(fs, path) if is_folder(fs, e))


def is_folder(fs: AbstractFileSystem, entry: Entry) -> bool:
    """Whether an entry is a folder; fsspec says "other" of a local link to one."""
    linked = entry["type"] == "other" and entry.get("islink")
    return entry["type"] == "directory" or bool(linked and fs.isdir(entry["name"]))


def files(fs: AbstractFileSystem, path: str, depth: float = math.inf) -> Iterator[Entry]:
    """Every file in a folder and in its subfolders, to a depth. Raises as `entries`."""
    for entry in entries(fs, path):
        if entry["type"] != "directory":
            yield entry
        elif depth > 1:
            yield from files(fs, f"{path}/{name_of(entry)}", depth - 1)


def matching(fs: AbstractFileSystem, folder: str, pattern: str) -> list[str]:
    """Paths in a folder whose own names match, sorted: the folder's path is no pattern.

    Raises as `entries`.
    """
    return sorted(e["name"] for e in entries(fs, folder) if fnmatchcase(name_of(e), pattern))


def name_of(entry: Entry) -> str:
    """A file's or folder's own name."""
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


def size_of(found: list[Entry]) -> int:
    """Bytes of files."""
    return sum(int(entry["size"] or 0) for entry in found)


def checksum(entry: Entry) -> str | None:
    """A remote store's own checksum of a file's bytes, with its name; None if it has none."""
    names = ("md5Hash", "crc32c", "ETag", "etag")
    return next((f"{name}:{entry[name]}" for name in names if entry.get(name)), None)


def modified(entry: Entry) -> float:
    """When a file was last written, in seconds since 1970; infinity for a folder without a time."""
    names = ("mtime", "LastModified", "updated", "created")
    at = next((entry[name] for name in names if entry.get(name)), math.inf)
    if isinstance(at, str):
        at = datetime.fromisoformat(at)
    return at.timestamp() if isinstance(at, datetime) else float(at)


def present_time(fs: AbstractFileSystem, folder: str) -> float:
    """The time, in seconds since 1970, by the clock that stamps the files of a filesystem."""
    probe = new_probe(fs, folder)
    fs.pipe_file(probe, b"")
    try:
        return modified(fs.info(probe))
    finally:
        fs.rm_file(probe)


def new_probe(fs: AbstractFileSystem, folder: str) -> str:
    """The path of a file to write and delete in a folder, where nothing is yet.

    Raises as the filesystem does if a bucket refuses to delete it: it would stay there.
    """
    probe = f"{folder}/.probe-{uuid.uuid4().hex}"
    if not isinstance(fs, LocalFileSystem):
        with suppress(FileNotFoundError):
            fs.rm_file(probe)
    return probe
