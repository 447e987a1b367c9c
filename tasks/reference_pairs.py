"""Which picture has which references, as the stage `references` stores it.

Processes of encoders import this module, in environments that lack pyarrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import BytesIO
from typing import Any, NamedTuple

from artifacts.filesystems import ask_at_once
from artifacts.latent_shards import shard_key as shard_key_of
from artifacts.records import read_checked
from artifacts.store import Artifact

#: A table of the pictures of each image shard, in the order of its tar. `tar` is the shard's key,
#: `references` their sha256 in order, or null if one of them was not downloaded.
PAIRS = "references.parquet"
COLUMNS = ("tar", "id", "references")


class Pair(NamedTuple):
    """A picture of an image shard, and its references."""

    id: bytes  # sha256 of the downloaded picture
    references: tuple[bytes, ...] | None  # None: one of them was not downloaded


def read_pairs(references: Artifact) -> dict[str, list[Pair]]:
    """Key of an image shard -> its pictures, of an artifact of the stage."""
    import pyarrow.parquet as pq

    table = pq.ParquetFile(BytesIO(references.read(PAIRS)), pre_buffer=False).read()
    pairs: dict[str, list[Pair]] = {}
    columns = (table[name].to_pylist() for name in COLUMNS)
    for tar, sha256, ids in zip(*columns, strict=True):
        pairs.setdefault(tar, []).append(Pair(sha256, None if ids is None else tuple(ids)))
    return pairs


def picture_ids(images: Artifact) -> dict[str, list[bytes]]:
    """Key of an image shard -> sha256 of its pictures, in the order of the tar."""
    keys = [shard_key_of(entry.path) for entry in _parquets(images)]
    return {
        key: [bytes.fromhex(sha256) for sha256 in rows if sha256 is not None]
        for key, rows in rows_of(images, keys)
    }


def rows_of(images: Artifact, keys: list[str]) -> Iterator[tuple[str, list[str | None]]]:
    """Key of an image shard -> sha256 (hex) of each row's picture; None of a row without one."""
    import pyarrow.parquet as pq

    named = {shard_key_of(entry.path): entry for entry in _parquets(images)}

    def read(key: str) -> list[str | None]:
        entry = named[key]
        data = read_checked(images.store.fs, images.path, entry.path, entry.sha256)
        columns = ["status", "sha256"]
        table = pq.ParquetFile(BytesIO(data), pre_buffer=False).read(columns, use_threads=False)
        rows: Mapping[str, list[Any]] = table.to_pydict()
        outcomes = zip(*(rows[name] for name in columns), strict=True)
        return [sha256 if status == "success" else None for status, sha256 in outcomes]

    yield from zip(keys, ask_at_once(images.store.fs, read, keys), strict=True)


def _parquets(images: Artifact) -> Iterator[Any]:
    return (entry for entry in images.files if entry.path.endswith(".parquet"))
