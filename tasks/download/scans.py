"""Remember the row hashes of files whose pictures must be read to be hashed."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from fsspec.core import url_to_fs

from artifacts.keys import digest_json
from artifacts.models import cache_folder
from tasks.download.lists import reading

#: What filesystems call that which changes when a file does.
MARKS = (
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
VERSION = 1  # of what a row's hash is made of


def remembered(file: str, columns: list[str], scan: Callable[[], Iterator[str]]) -> Iterator[str]:
    """The row hashes (hex) that `scan()` gives for `file`, from last time if it has not changed.

    A hub dataset is then read once, not at every run. What is remembered lies in the cache folder
    as a digest and the hashes; where either is off, or a file's change cannot be told, it is read.
    """
    place = _place(file, columns)
    hashes = None if place is None else _load(place)
    if hashes is not None:
        yield from (hashes[i : i + SIZE].hex() for i in range(0, len(hashes), SIZE))
        return
    found = bytearray()
    for row_hash in scan():
        found += bytes.fromhex(row_hash)
        yield row_hash
    if place is not None:
        _save(place, bytes(found))


def _place(file: str, columns: list[str]) -> Path | None:
    with reading(file):
        fs, path = url_to_fs(file)
        info = fs.info(path)
    marks = {name: str(info[name]) for name in MARKS if info.get(name) is not None}
    if not marks:
        return None
    what = {"file": file, "size": info.get("size"), "marks": marks, "columns": columns}
    return cache_folder() / "scans" / digest_json({**what, "version": VERSION})


def _load(place: Path) -> bytes | None:
    try:
        data = place.read_bytes()
    except OSError:
        return None
    whole = len(data) % SIZE == 0 and hashlib.sha256(data[SIZE:]).digest() == data[:SIZE]
    return data[SIZE:] if whole else None


def _save(place: Path, hashes: bytes) -> None:
    with suppress(OSError):  # a cache that cannot be written costs time, nothing else
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor, beside = tempfile.mkstemp(dir=place.parent)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(hashlib.sha256(hashes).digest() + hashes)
        Path(beside).replace(place)
