"""A set of files that is either wholly there or not there: a record naming them, written last."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from artifacts.keys import digest_json, digest_stream

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


@dataclass(frozen=True)
class FileEntry:
    """One committed file: its path below the record's root, its bytes' fingerprint, and facts."""

    path: str
    size: int
    sha256: str
    meta: dict[str, Any] = field(default_factory=dict)
    etag: str | None = None  # a remote store's own checksum of it, which need not be read for it

    def as_dict(self) -> dict[str, Any]:
        """What a record says of it."""
        facts = asdict(self)
        if self.etag is None:
            del facts["etag"]
        return facts

    def content(self) -> dict[str, Any]:
        """The part that a digest is taken over."""
        return {"path": self.path, "size": self.size, "sha256": self.sha256}


def hash_file(
    fs: AbstractFileSystem, root: str, path: str, meta: dict[str, Any] | None = None
) -> FileEntry:
    """Fingerprint the file at `root/path`."""
    with fs.open(_locate(root, path), "rb") as stream:
        sha256, size = digest_stream(stream)
    return FileEntry(path, size, sha256, meta or {})


def _locate(root: str, path: str) -> str:
    """`root/path` without `..`, which is a name like any other to an object store."""
    while path.startswith("../"):
        root, path = root.rpartition("/")[0], path[3:]
    return f"{root}/{path}"


def hash_local(local: str, path: str, meta: dict[str, Any] | None = None) -> FileEntry:
    """Fingerprint a local file that is to be copied to `path`."""
    with open(local, "rb") as stream:
        sha256, size = digest_stream(stream)
    return FileEntry(path, size, sha256, meta or {})


def put_atomic(fs: AbstractFileSystem, local: str, path: str) -> None:
    """Copy a local file so that a reader sees all of it or the file that was there before."""
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    if not isinstance(fs, LocalFileSystem):
        fs.put_file(local, path)
        return
    with _replacing(path) as beside:
        shutil.copyfile(local, beside)


def write_atomic(fs: AbstractFileSystem, path: str, data: bytes) -> None:
    """Write `data` so that a reader sees all of it or the file that was there before.

    Object stores do this by themselves; a local file is written beside and renamed.
    """
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    if not isinstance(fs, LocalFileSystem):
        fs.pipe_file(path, data)
        return
    with _replacing(path) as beside, open(beside, "wb") as stream:
        stream.write(data)


@contextmanager
def _replacing(path: str) -> Iterator[str]:
    """A name to write to that becomes `path` at the end, once its bytes are on the disk."""
    beside = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        yield beside
        with open(beside, "rb") as stream:
            os.fsync(stream.fileno())
        os.replace(beside, path)
    except BaseException:
        if os.path.exists(beside):
            os.unlink(beside)
        raise


def write_record(fs: AbstractFileSystem, path: str, record: dict[str, Any]) -> None:
    """Commit: write the record at `path`, after every file that it names.

    It carries a sha256 of its own content, so that a record that is damaged is known to be.
    """
    files = [f.as_dict() if isinstance(f, FileEntry) else f for f in record.get("files", [])]
    # As it will be read: JSON has no tuples, and its names are all text.
    content = json.loads(json.dumps({**record, "files": files}, allow_nan=False))
    write_atomic(fs, path, _seal(content))


def _seal(content: dict[str, Any]) -> bytes:
    sealed = {"sha256": digest_json(content), **content}
    return json.dumps(sealed, indent=1, ensure_ascii=False, allow_nan=False).encode()


def read_record(fs: AbstractFileSystem, path: str) -> dict[str, Any] | None:
    """Read a record; None when there is none. A damaged one raises ValueError.

    A remote store that does not give it raises as its client does: that is no damage.
    """
    try:
        data = fs.cat_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        if not isinstance(fs, LocalFileSystem):
            raise
        raise ValueError(f"{path} is not a readable record: {error}") from None
    try:
        record: dict[str, Any] = json.loads(data)
        del record["sha256"]
        if _seal(record) != data:  # to the byte: a number can be spelt in several ways
            raise ValueError("its content is not what was written")
        record["files"] = [FileEntry(**entry) for entry in record["files"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a readable record: {error}") from None
    return record


def stamp(fs: AbstractFileSystem, root: str, entry: FileEntry) -> FileEntry:
    """The entry of a file that is in place, with the store's own checksum if it keeps one.

    Google's, Amazon's and Azure's stores do; local disks and memory do not.
    """
    if entry.etag is not None or isinstance(fs, LocalFileSystem):
        return entry
    etag, size = _store_checksum(fs, _locate(root, entry.path))
    return replace(entry, etag=etag) if size == entry.size else entry


def _is_as_stamped(fs: AbstractFileSystem, root: str, entry: FileEntry) -> bool:
    if entry.etag is None or isinstance(fs, LocalFileSystem):
        return False
    return _store_checksum(fs, _locate(root, entry.path)) == (entry.etag, entry.size)


def _store_checksum(fs: AbstractFileSystem, path: str) -> tuple[str | None, int | None]:
    fs.invalidate_cache(path.rpartition("/")[0])  # a listing made earlier says what was there then
    info = fs.info(path)
    name = next((n for n in ("md5Hash", "crc32c", "ETag", "etag") if info.get(n)), None)
    return None if name is None else f"{name}:{info[name]}", info.get("size")


def first_fault(
    fs: AbstractFileSystem, root: str, files: list[FileEntry], *, deep: bool = False
) -> str | None:
    """Check every file; say in words what is wrong with the first that differs, or None.

    A file is re-hashed, unless the store's own checksum of it is the recorded one; `deep` re-hashes
    every file. A remote store that does not give one raises as its client does: that is no fault.
    """
    for entry in files:
        try:
            if not deep and _is_as_stamped(fs, root, entry):
                continue
            found = hash_file(fs, root, entry.path)
        except FileNotFoundError:
            return f"{entry.path} is missing"
        except OSError as error:
            if not isinstance(fs, LocalFileSystem):
                raise
            return f"{entry.path} cannot be read: {error.strerror or error}"
        if found.size != entry.size:
            return f"{entry.path} has {found.size} bytes, {entry.size} were committed"
        if found.sha256 != entry.sha256:
            return f"{entry.path} is damaged: its sha256 differs from the committed one"
    return None
