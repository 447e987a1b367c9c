"""A set of files that is either wholly there or not there: a record naming them, written last."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from dataclasses import asdict, dataclass, field
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from artifacts.keys import digest_json, digest_stream


@dataclass(frozen=True)
class FileEntry:
    """One committed file: its path below the record's root, its bytes' fingerprint, and facts."""

    path: str
    size: int
    sha256: str
    meta: dict[str, Any] = field(default_factory=dict)

    def content(self) -> dict[str, Any]:
        """The part that a digest is taken over."""
        return {"path": self.path, "size": self.size, "sha256": self.sha256}


def hash_file(
    fs: AbstractFileSystem, root: str, path: str, meta: dict[str, Any] | None = None
) -> FileEntry:
    """Fingerprint the file at `root/path`."""
    with fs.open(f"{root}/{path}", "rb") as stream:
        sha256, size = digest_stream(stream)
    return FileEntry(path, size, sha256, meta or {})


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
    beside = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        shutil.copyfile(local, beside)
        os.replace(beside, path)
    except BaseException:
        if os.path.exists(beside):
            os.unlink(beside)
        raise


def write_atomic(fs: AbstractFileSystem, path: str, data: bytes) -> None:
    """Write `data` so that a reader sees all of it or the file that was there before.

    Object stores do this by themselves; a local file is written beside and renamed.
    """
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    if not isinstance(fs, LocalFileSystem):
        fs.pipe_file(path, data)
        return
    beside = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        with open(beside, "wb") as stream:
            stream.write(data)
            stream.flush()
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
    files = [asdict(f) if isinstance(f, FileEntry) else f for f in record.get("files", [])]
    content = {**record, "files": files}
    sealed = {"sha256": digest_json(content), **content}
    text = json.dumps(sealed, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomic(fs, path, text.encode())


def read_record(fs: AbstractFileSystem, path: str) -> dict[str, Any] | None:
    """Read a record; None when there is none. A damaged one raises ValueError."""
    try:
        record: dict[str, Any] = json.loads(fs.cat_file(path))
        if record.pop("sha256") != digest_json(record):
            raise ValueError("its content is not what was written")
        record["files"] = [FileEntry(**entry) for entry in record["files"]]
    except FileNotFoundError:
        return None
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a readable record: {error}") from None
    return record


def first_fault(fs: AbstractFileSystem, root: str, files: list[FileEntry]) -> str | None:
    """Re-hash every file; say in words what is wrong with the first that differs, or None."""
    for entry in files:
        try:
            found = hash_file(fs, root, entry.path)
        except FileNotFoundError:
            return f"{entry.path} is missing"
        except OSError as error:
            return f"{entry.path} cannot be read: {error.strerror or error}"
        if found.size != entry.size:
            return f"{entry.path} has {found.size} bytes, {entry.size} were committed"
        if found.sha256 != entry.sha256:
            return f"{entry.path} is damaged: its sha256 differs from the committed one"
    return None
