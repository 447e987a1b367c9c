"""The groups and the cluster of each picture, from the descriptions of all pictures.

They depend on no condition, so that another threshold compares no pictures again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from configs.settings.select import Select
from tasks.encode.near_duplicates import SIDE
from tasks.select import duplicates

#: Columns of descriptions -> rows with their ids.
Describe = Callable[[list[str]], pa.RecordBatchReader]


def group_pictures(
    db: duckdb.DuckDBPyConnection, describe: Describe, select: Select, folder: Path
) -> pa.Table:
    """One row per picture, sorted by `id`, its sha256.

    `kiln_near` int64: group by near hashes and thumbnails; `kiln_similar` int64: that group, closed
    over near embeddings; `cluster` int64: cluster of embeddings, null without one.

    Args:
        db: has a view `listed` with the ids of all pictures.
        describe: returns columns of the descriptions, and the ids of their pictures.
        folder: for thumbnails and embeddings, 256 and 2 x D bytes a picture.
    """
    ids = db.sql("select distinct id from listed order by id").to_arrow_table()["id"]
    # Of 50 M pictures, no two have the same first 8 bytes.
    numbers = sha256_numbers(ids)[:, 0].copy()
    count = len(ids)
    near = duplicates.ungrouped(count)
    if select.duplicates.perceptual:
        near = _join_near_hashes(numbers, describe, select, folder, near)
    similar = near
    if name := select.duplicates.semantic:
        rows, embeddings = _embeddings(numbers, describe, name, folder)
        least = select.duplicates.min_cosine
        similar = duplicates.join_near_embeddings(near, rows, embeddings, least)
    cluster = pa.nulls(count, pa.int64())
    if select.clusters is not None:
        rows, embeddings = _embeddings(numbers, describe, select.clusters.describer, folder)
        clusters = np.full(count, -1)
        clusters[rows] = duplicates.clusters(rows, embeddings, select.clusters.count)
        cluster = pa.array(clusters, mask=clusters < 0)
    return pa.table({"id": ids, "kiln_near": near, "kiln_similar": similar, "cluster": cluster})


def _join_near_hashes(
    numbers: NDArray[np.uint64],
    describe: Describe,
    select: Select,
    folder: Path,
    groups: duplicates.Rows,
) -> duplicates.Rows:
    """The groups, after pictures with near hashes were joined; thumbnails stay on the disk."""
    chosen = select.duplicates
    columns = [f"{chosen.perceptual}_{value}" for value in ("phash", "mirrored", "thumbnail")]
    pictures = [np.zeros(0, np.int64)]
    hashes = [np.zeros((2, 0), np.uint64)]
    with (folder / "thumbnails").open("wb") as file:
        for some, values in _described(numbers, describe, columns):
            pictures.append(some)
            hashes.append(np.stack([values[column] for column in columns[:2]]))
            file.write(values[columns[2]].tobytes())
    rows, places = np.unique(np.concatenate(pictures), return_index=True)
    if len(rows) == 0:
        return groups
    own, mirrored = np.concatenate(hashes, axis=1)[:, places]
    with (folder / "thumbnails").open("rb") as stored:

        def thumbnails(some: duplicates.Rows) -> NDArray[np.uint8]:
            size = SIDE * SIDE  # a mapped file would count as memory of this process
            read = (
                os.pread(stored.fileno(), size, size * place) for place in places[some].tolist()
            )
            return np.frombuffer(b"".join(read), np.uint8).reshape(-1, SIDE, SIDE)

        limits = (chosen.distance, chosen.min_correlation)
        return duplicates.join_near_hashes(groups, rows, own, mirrored, thumbnails, *limits)


def _embeddings(
    numbers: NDArray[np.uint64], describe: Describe, name: str, folder: Path
) -> tuple[duplicates.Rows, NDArray[np.float16]]:
    """The pictures that have an embedding, i64 [M], and the embeddings f16 [N, D], on the disk."""
    count = len(numbers)
    has = np.zeros(count, bool)
    embeddings = np.zeros((0, 1), np.float16)
    for some, values in _described(numbers, describe, [name]):
        vectors = values[name].reshape(len(some), -1)
        if len(embeddings) == 0:
            shape = (count, vectors.shape[1])
            embeddings = np.memmap(folder / name, np.float16, "w+", shape=shape)
        has[some] = True
        embeddings[some] = vectors
    return np.flatnonzero(has), embeddings


def _described(
    numbers: NDArray[np.uint64], describe: Describe, columns: list[str]
) -> Iterator[tuple[duplicates.Rows, dict[str, NDArray[Any]]]]:
    """Rows of pictures, and their values, of those that are described, in batches.

    The values of lists and of bytes follow each other in one dimension.

    Args:
        numbers: first 8 bytes of the sha256 of all pictures, sorted, u64 [N].
    """
    for batch in describe(columns):
        known = batch.filter(batch[columns[0]].is_valid())
        if len(known):
            rows = np.searchsorted(numbers, sha256_numbers(pa.chunked_array([known["id"]]))[:, 0])
            yield rows, {name: _values(known[name]) for name in columns}


def _values(column: pa.Array) -> NDArray[Any]:
    if pa.types.is_fixed_size_binary(column.type):
        column = column.cast(pa.binary())
    if pa.types.is_binary(column.type):
        return np.frombuffer(b"".join(column.to_pylist()), np.uint8)
    return np.asarray(column.flatten() if pa.types.is_list(column.type) else column)


def sha256_numbers(ids: pa.ChunkedArray) -> NDArray[np.uint64]:
    """sha256 of pictures as four numbers of 64 bits, the first bytes in the first: u64 [N, 4]."""
    fixed = ids.cast(pa.binary(32)).combine_chunks()
    numbers = np.frombuffer(fixed.buffers()[1], ">u8").reshape(-1, 4)
    return numbers[fixed.offset : fixed.offset + len(fixed)].astype(np.uint64)
