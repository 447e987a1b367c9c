"""Cache the row hashes of files with embedded pictures, which are slow to hash."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from fsspec.core import url_to_fs

from artifacts.digests import digest_json
from artifacts.resolve_model import cache_folder
from tasks.download.parquet_csv_jsonl import reading

#: Names, in fsspec's file info, of values that change when the file changes.
CHANGE_MARKERS = (
    "mtime",
    "ino",
    "oid",
    "blob_id",  # the hub's
    "etag",
    "ETag",
    "generation",
    "md5Hash",
    "crc32c",
    "LastModified",
)
SIZE = hashlib.sha256().digest_size
VERSION = 2  # increment when the definition of a row's hash changes


def cached_row_hashes(
    file: str, columns: list[str], scan: Callable[[], Iterator[str]]
) -> Iterator[str]:
    """The row hashes (hex) of `file`: cached if it is unchanged, else from `scan()`.

    A cache entry is a sha256 followed by the hashes. A damaged entry, or a filesystem without
    change markers, causes a new scan.

    Raises:
        SourceError: the file's info cannot be read.
    """
    path = _cache_path(file, columns)
    hashes = None if path is None else _load(path)
    if hashes is not None:
        yield from (hashes[i : i + SIZE].hex() for i in range(0, len(hashes), SIZE))
        return
    found = bytearray()
    for row_hash in scan():
        found += bytes.fromhex(row_hash)
        yield row_hash
    if path is not None:
        _save(path, bytes(found))


def _cache_path(file: str, columns: list[str]) -> Path | None:
    with reading(file):
        fs, name = url_to_fs(file)
        info = fs.info(name)
    marks = {name: str(info[name]) for name in CHANGE_MARKERS if info.get(name) is not None}
    if not marks:
        return None
    what = {"file": file, "size": info.get("size"), "marks": marks, "columns": columns}
    return cache_folder() / "scans" / digest_json({**what, "version": VERSION})


def _load(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    whole = len(data) % SIZE == 0 and hashlib.sha256(data[SIZE:]).digest() == data[:SIZE]
    return data[SIZE:] if whole else None


def _save(path: Path, hashes: bytes) -> None:
    with suppress(OSError):  # the cache only saves time, so a failed write is harmless
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(hashlib.sha256(hashes).digest() + hashes)
        Path(temporary).replace(path)
