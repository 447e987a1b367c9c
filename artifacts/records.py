"""Records: sets of files that are wholly there or not there, with their digests and stamps.

A record names the files of a set, and is written last. A stamp changes with a file's bytes and is
known without reading them: a remote store's own checksum, or a local file's time stamp. Files in
memory have neither. Digests of JSON are those of its canonical form.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from io import BytesIO
from typing import IO, Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from artifacts import filesystems
from artifacts.errors import is_of_client, refusals
from configs.errors import Failed

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
    info = filesystems.file_info(fs, path)
    return filesystems.checksum(info), info.get("size")


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
    """Change a damaged file's time stamp, so that no reuse trusts its committed stamp.

    A remote store's checksum cannot outlast its bytes.
    """
    if isinstance(fs, LocalFileSystem):
        with suppress(OSError):  # somebody else's file: the damage is reported all the same
            os.utime(path)


CHUNK = 2**20


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys, no spaces and no NaN: equal values give equal bytes."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def parse_json(text: str | bytes) -> Any:
    """The value of JSON text. Raises ValueError, also for nesting too deep for Python."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def digest_json(value: Any) -> str:
    """sha256 (hex) of the canonical JSON of `value`."""
    return digest_bytes(canonical_json(value))


def digest_bytes(data: bytes) -> str:
    """sha256 (hex) of `data`."""
    return hashlib.sha256(data).hexdigest()


def digest_stream(stream: IO[bytes]) -> tuple[str, int]:
    """sha256 (hex) and byte count of the rest of `stream`."""
    digest = hashlib.sha256()
    size = 0
    while chunk := stream.read(CHUNK):
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size


#: The format of records. A newer version writes a higher number.
FORMAT = 2
#: Bytes of a file that is written to a remote store by one conditional request.
SMALL = 2**26
#: Files of a remote store that are read and hashed at once.
DEEP_AT_ONCE = 4
#: Errors of a local file system that say nothing about the file: this process has too many open
#: files, too little memory or no permission, or the network file system does not respond.
UNRELATED_ERRORS = (
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN),
)
#: What stands before the files of a record.
FILES = b'\n"files": ['
_line = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


class Damaged(Failed, ValueError):
    """A committed file's bytes are no longer those that were committed."""


@dataclass(frozen=True, slots=True)  # a manifest can have a million
class FileEntry:
    """One committed file: its path below the record's root, its bytes' fingerprint, and facts."""

    path: str
    size: int
    sha256: str
    meta: dict[str, Any] = field(default_factory=dict)
    #: What changes with its bytes, and is known without reading them: a remote store's own
    #: checksum, the time stamp of a local file.
    etag: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """What a record says of it."""
        etag = {} if self.etag is None else {"etag": self.etag}
        return {**self.content(), "meta": self.meta, **etag}

    def content(self) -> dict[str, Any]:
        """The part that a digest is taken over."""
        return {"path": self.path, "size": self.size, "sha256": self.sha256}


def hash_file(fs: AbstractFileSystem, root: str, path: str) -> FileEntry:
    """Fingerprint the file at `root/path`; a local file is stamped as before it was read."""
    place = _locate(root, path)
    etag = time_stamp(place) if isinstance(fs, LocalFileSystem) else None
    with fs.open(place, "rb") as stream:
        sha256, size = digest_stream(stream)
    return FileEntry(path, size, sha256, etag=etag)


def _locate(root: str, path: str) -> str:
    """`root/path` without `..`, which is a name like any other to an object store."""
    while path.startswith("../"):
        root = root.rpartition("/")[0]
        path = path[3:]
    return f"{root}/{path}"


def hash_local(local: str, path: str, meta: dict[str, Any] | None = None) -> FileEntry:
    """Fingerprint a local file that is to be copied to `path`."""
    with open(local, "rb") as stream:
        sha256, size = digest_stream(stream)
    return FileEntry(path, size, sha256, meta or {})


def put_atomic(
    fs: AbstractFileSystem, local: str, path: str, check: Callable[[], None] | None = None
) -> str | None:
    """Copy a local file so that a reader sees all of it or the file that was there before.

    Args:
        check: called last before the change; what it raises prevents the change.

    Returns the time stamp of the copy if it is local.
    """
    if isinstance(fs, LocalFileSystem):
        with filesystems.replacing(path, check) as beside:
            shutil.copyfile(local, beside)
            return time_stamp(beside)  # now: once it is in place it may be another builder's
    if check is not None:
        check()
    filesystems.make_folder_of(fs, path)
    fs.put_file(local, path)
    return None


def write_atomic(
    fs: AbstractFileSystem, path: str, data: bytes, check: Callable[[], None] | None = None
) -> str | None:
    """As `put_atomic`, with the bytes of the file."""
    if isinstance(fs, LocalFileSystem):
        with filesystems.replacing(path, check) as beside:
            with open(beside, "wb") as stream:
                stream.write(data)
            return time_stamp(beside)
    if check is not None:
        check()
    filesystems.make_folder_of(fs, path)
    fs.pipe_file(path, data)
    return None


def write_record(fs: AbstractFileSystem, path: str, record: dict[str, Any]) -> None:
    """Commit: write the record at `path`, after every file that it names."""
    write_atomic(fs, path, encode_record(record))


def encode_record(record: dict[str, Any]) -> bytes:
    """A record as JSON with one line per file.

    The first line has the sha256 of all bytes behind it, which makes damage known.
    """
    files = (f.as_dict() if isinstance(f, FileEntry) else f for f in record.get("files", []))
    facts = {name: value for name, value in record.items() if name != "files"}
    head = json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False)[1:-2]
    lines = ",\n".join(map(_line, files))
    body = f"{head}{',' if facts else ''}{FILES.decode()}\n{lines}\n]}}".encode()
    return _seal(body) + body


def _seal(body: bytes | memoryview) -> bytes:
    """The first line of a record."""
    return f'{{"sha256": "{hashlib.sha256(body).hexdigest()}",'.encode()


SEAL_SIZE = len(_seal(b""))


def digest_files(files: Iterable[FileEntry]) -> str:
    """sha256 (hex) of the canonical JSON of the list of files' contents."""
    digest = hashlib.sha256(b"[")
    comma = b""
    for entry in files:
        digest.update(comma + canonical_json(entry.content()))
        comma = b","
    digest.update(b"]")
    return digest.hexdigest()


def read_record(
    fs: AbstractFileSystem, path: str, *, with_files: bool = True
) -> dict[str, Any] | None:
    """Read a record; None when there is none.

    Args:
        with_files: whether the record has its files; without them it is small.

    Raises:
        Damaged: its bytes are not those that were written.
        Failed: a newer version wrote it.

    A remote store that does not give it raises as its client does: that is no damage.
    """
    try:
        with refusals():
            data = filesystems.read_small_file(fs, path)
    except FileNotFoundError:
        return None
    except OSError as error:
        if _tells_nothing(fs, error):
            raise
        raise Damaged(f"{path} is not a readable record: {error}") from None
    return decode_record(data, path, with_files=with_files)


def decode_record(data: bytes, path: str, *, with_files: bool = True) -> dict[str, Any]:
    """The record that `encode_record` wrote. Raises Damaged and Failed, as `read_record`."""
    try:
        if _seal(memoryview(data)[SEAL_SIZE:]) != data[:SEAL_SIZE]:
            raise ValueError("its content is not what was written")
        end = data.index(FILES, SEAL_SIZE)
        record: dict[str, Any] = parse_json(b"{%b}" % data[SEAL_SIZE:end].rstrip(b","))
        if record.get("format", FORMAT) > FORMAT:
            raise Failed(f"{path} was written by a newer version of kilnworks: update this one")
        if with_files:
            with without_collections():  # they would visit all entries again and again
                record["files"] = list(_entries(data, end + len(FILES)))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise Damaged(f"{path} is not a readable record: {error}") from None
    return record


@contextmanager
def without_collections() -> Iterator[None]:
    """Pause Python's collector of cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _entries(data: bytes, start: int) -> Iterator[FileEntry]:
    """The files of a record, line by line: parsed at once, they would need twice the memory."""
    stream = BytesIO(data)
    stream.seek(start)
    for line in stream:
        if line not in (b"\n", b"]}"):
            yield _entry(**parse_json(line.rstrip(b",\n").decode()))


def _entry(**facts: Any) -> FileEntry:
    """A file's entry in a record. Raises TypeError unless its facts have their types."""
    entry = FileEntry(**facts)
    texts = (entry.path, entry.sha256, "" if entry.etag is None else entry.etag)
    if not all(isinstance(text, str) for text in texts) or not isinstance(entry.meta, dict):
        raise TypeError(f"an entry of a file is invalid: {facts!s:.200}")
    return entry


def stamped(fs: AbstractFileSystem, root: str, entries: Iterable[FileEntry]) -> list[FileEntry]:
    """The entries of files that are in place, each with what changes with its bytes.

    Local files were stamped when they were written or hashed; Google's, Amazon's and Azure's stores
    keep checksums; a memory keeps nothing.
    """
    if isinstance(fs, LocalFileSystem):
        time.sleep(TICK)  # a change within the same tick would leave the time stamp as it is
        return list(entries)
    return list(filesystems.ask_at_once(fs, partial(_with_checksum, fs, root), entries))


def _with_checksum(fs: AbstractFileSystem, root: str, entry: FileEntry) -> FileEntry:
    if entry.etag is not None:
        return entry
    etag, size = present_stamp(fs, _locate(root, entry.path))
    return replace(entry, etag=etag) if size == entry.size else entry


def first_fault(
    fs: AbstractFileSystem, root: str, files: list[FileEntry], *, deep: bool = False
) -> str | None:
    """Check every file; say in words what is wrong with the first that differs, or None.

    A file is hashed unless its size and stamp are those that were committed; `deep` hashes every
    file. If a remote store does not give the file, its client raises: that is no fault.
    """
    find = partial(file_fault, fs, root, deep=deep)
    at_once = DEEP_AT_ONCE if deep else filesystems.AT_ONCE
    return next(filter(None, filesystems.ask_at_once(fs, find, files, at_once)), None)


def file_fault(
    fs: AbstractFileSystem, root: str, entry: FileEntry, *, deep: bool = False
) -> str | None:
    """As `first_fault`, for a single file."""
    place = _locate(root, entry.path)
    committed = (entry.etag, entry.size)
    try:
        with refusals():
            if not deep and entry.etag is not None and present_stamp(fs, place) == committed:
                return None
            stored = hash_file(fs, root, entry.path)
    except FileNotFoundError:
        return f"{entry.path} is missing"
    except OSError as error:
        if _tells_nothing(fs, error):
            raise
        return f"{entry.path} cannot be read: {error.strerror or error}"
    if stored.size != entry.size:
        return f"{entry.path} has {stored.size} bytes, {entry.size} were committed"
    if stored.sha256 != entry.sha256:
        distrust(fs, place)
        return f"{entry.path} is damaged: its sha256 differs from the committed one"
    if entry.etag is not None:
        restore_stamp(fs, place, stored.etag, entry.etag)
    return None


def _tells_nothing(fs: AbstractFileSystem, error: OSError) -> bool:
    """Whether a file that could not be read may be intact."""
    return not isinstance(fs, LocalFileSystem) or error.errno in UNRELATED_ERRORS


class _Hashed:
    """A stream that hashes what is read of it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._digest.update(data)
        return data

    def sha256(self) -> str:
        """The sha256 of the whole file; the rest of it is read now."""
        while self.read(2**20):
            pass
        return self._digest.hexdigest()


@contextmanager
def open_checked(url: str, sha256: str) -> Iterator[Any]:
    """A committed file, to be read once from its beginning; what is left unread is read at the end.

    Raises Damaged at the end if its bytes are not those of `sha256`, whatever else they led to.
    """
    fs, path = url_to_fs(url)
    with fs.open(path, "rb") as file:
        stream = _Hashed(file)
        try:
            yield stream
        except Exception as error:
            away = isinstance(error, OSError) or is_of_client(error)
            if away or stream.sha256() == sha256:
                raise
            raise _damaged(fs, path, url) from error
        if stream.sha256() != sha256:
            raise _damaged(fs, path, url)


def read_checked(fs: AbstractFileSystem, root: str, path: str, sha256: str) -> bytes:
    """The bytes of the committed file `root/path`. Raises Damaged if its sha256 is another."""
    place = _locate(root, path)
    data = bytes(fs.cat_file(place))
    if digest_bytes(data) != sha256:
        raise _damaged(fs, place, place)
    return data


def copy_checked(
    url: str, sha256: str, fs: AbstractFileSystem, path: str, check: Callable[[], None]
) -> str | None:
    """Copy a committed file to `path`, as `put_atomic`. Raises Damaged as `open_checked`."""
    if isinstance(fs, LocalFileSystem):
        with filesystems.replacing(path, check) as beside:
            with open_checked(url, sha256) as source, open(beside, "wb") as sink:
                shutil.copyfileobj(source, sink, 2**22)
            return time_stamp(beside)
    check()
    with open_checked(url, sha256) as source, fs.open(path, "wb") as sink:
        shutil.copyfileobj(source, sink, 2**22)
    return None


def _damaged(fs: AbstractFileSystem, path: str, url: str) -> Damaged:
    distrust(fs, path)
    return Damaged(f"{url} is damaged: its sha256 differs from the committed one; run again")
