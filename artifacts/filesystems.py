"""Files and folders on any filesystem: whole writes, exact listings, many requests, and a clock.

A change of a local disk is whole at any moment, and outlives a power failure.

A listing never takes an error for an absence, whereas fsspec's `exists`, `glob`, `find` and `walk`
leave out what they cannot read. A whole folder is deleted or fetched by its exact path. fsspec's
`rm` and `get` take `[`, `*` and `?` in a bucket's path for a pattern: they would delete or copy
what another folder has. A remote store gets many requests at once, since each answer takes tens of
milliseconds.

Tests can replace the clock, which measures and waits.
"""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from inspect import signature
from itertools import islice
from typing import Any, TypeVar

from fsspec import AbstractFileSystem
from fsspec.asyn import sync
from fsspec.implementations.local import LocalFileSystem

from artifacts.errors import is_full


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


Entry = dict[str, Any]  # as fsspec describes a file or a folder


def entries(fs: AbstractFileSystem, path: str) -> list[Entry]:
    """What a folder holds; nothing if there is no such folder. Raises as the filesystem does."""
    folder = str(fs._strip_protocol(path)).rstrip("/")  # as its entries are named
    try:
        listing = fs.ls(folder, detail=True)
    except FileNotFoundError:
        return []
    # A bucket lists a folder's own marker too, and every filesystem a file as itself.
    return [entry for entry in listing if entry["name"].rstrip("/") != folder]


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


def size_of(listing: list[Entry]) -> int:
    """Bytes of files."""
    return sum(int(entry["size"] or 0) for entry in listing)


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


#: The most objects that S3 deletes by one request.
S3_BULK = 1000


def delete_tree(fs: AbstractFileSystem, path: str) -> None:
    """Delete a file, or a folder with all its content. Raises as the filesystem does."""
    known = protocols(fs)
    if not known & {"gs", "s3"}:
        fs.rm(path, recursive=True)  # a local path is never a pattern
        return
    paths = fs.find(path)
    # One request for many must have a checksum, of a kind that differs between stores of S3.
    if "s3" in known and fs.is_of_amazon:
        for start in range(0, len(paths), S3_BULK):
            sync(fs.loop, fs._bulk_delete, paths[start : start + S3_BULK])
        return

    def delete(name: str) -> None:
        with suppress(FileNotFoundError):  # another process was first
            fs.rm_file(name)

    for _ in ask_at_once(fs, delete, paths):
        pass


def fetch_files(fs: AbstractFileSystem, root: str, names: Iterable[str], folder: str) -> None:
    """Copy files to a local folder, each at its path below `root`.

    Args:
        names: paths of files below `root`, or `root` itself, as `fs.find(root)` gives them.

    Raises:
        ValueError: a name leads out of the folder.
    """
    top = root.rstrip("/")
    wanted = [name for name in names if not name.endswith("/")]  # a bucket's marker of a folder
    for name in wanted:
        if not f"{name}/".startswith(f"{top}/") or ".." in name.split("/"):
            raise ValueError(f"{name!r} leads out of its folder")
    local = [f"{folder}{name[len(top) :]}" for name in wanted]
    for parent in {os.path.dirname(path) for path in local}:
        os.makedirs(parent, exist_ok=True)
    fs.get(wanted, local)  # lists are taken as they are


def seconds_since_boot() -> float:
    """Monotonic time; on Linux it also advances while the machine is suspended."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)  # Linux only
    return time.monotonic() if clock is None else time.clock_gettime(clock)


@dataclass(frozen=True)
class Clock:
    """Monotonic time in seconds, and a sleep."""

    now: Callable[[], float] = seconds_since_boot
    sleep: Callable[[float], None] = time.sleep


REAL = Clock()


def protocols(fs: AbstractFileSystem) -> set[str]:
    """The URL schemes of a filesystem."""
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def find_files(fs: AbstractFileSystem, path: str) -> dict[str, dict[str, Any]]:
    """Every file below a folder, by path, as `find` with its details. Raises as the filesystem.

    On a web server `find` would leave out the folders that cannot be listed now.
    """

    def unless_missing(error: Exception) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    more = {"on_error": unless_missing} if protocols(fs) & {"http", "https"} else {}
    return dict(fs.find(path, detail=True, **more))


def make_folder_of(fs: AbstractFileSystem, path: str) -> None:
    """Make the folder of a file. An object store has none: s3fs would ask for the bucket."""
    if not protocols(fs) & {"gs", "s3"}:
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)


def read_small_file(fs: AbstractFileSystem, path: str) -> bytes:
    """The bytes of a file, by one request: s3fs would ask for the size first.

    Raises as the filesystem does.
    """
    known = signature(fs._cat_file).parameters if "s3" in protocols(fs) else {}
    # s3fs 2025.10, of runtime mindspore's environment, has one request and no such argument.
    alone = {"max_concurrency": 1} if "max_concurrency" in known else {}
    return bytes(fs.cat_file(path, **alone))


def file_info(fs: AbstractFileSystem, path: str) -> dict[str, Any]:
    """What fsspec describes of a file, by one request: gcsfs would also list the bucket.

    Raises as the filesystem does.
    """
    if "gs" not in protocols(fs):
        return dict(fs.info(path))
    bucket, key, _ = fs.split_path(path)
    info = fs.call("GET", "b/{}/o/{}", bucket, key, json_out=True)
    return {**info, "size": int(info["size"])}


#: Requests in flight. S3's client opens so many connections, see `Store`.
AT_ONCE = 64
#: Items that are submitted together, which bounds the memory.
BATCH = 1024
Item = TypeVar("Item")
Answer = TypeVar("Answer")


def ask_at_once(
    fs: AbstractFileSystem,
    ask: Callable[[Item], Answer],
    items: Iterable[Item],
    at_once: int = AT_ONCE,
) -> Iterator[Answer]:
    """`ask(item)` for each item, in order; up to `at_once` threads ask a remote store.

    A local filesystem is asked one item after another. Raises as `ask` does.
    """
    if isinstance(fs, LocalFileSystem):
        yield from map(ask, items)
        return
    pending = iter(items)
    with ThreadPoolExecutor(at_once, thread_name_prefix="store") as pool:
        while batch := list(islice(pending, BATCH)):
            yield from pool.map(ask, batch)
