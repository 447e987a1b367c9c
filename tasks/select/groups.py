"""The groups and the cluster of each picture, from the descriptions of all pictures.

They depend on no condition, so that another threshold compares no pictures again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from configs.settings.select import Select
from tasks.encode.near_duplicates import SIDE
from tasks.select import duplicates
from tasks.sql_condition import quoted

#: Rows of a batch from DuckDB.
BATCH = 1 << 14


def group_pictures(db: duckdb.DuckDBPyConnection, select: Select, folder: Path) -> pa.Table:
    """One row per picture, sorted by `id`, its sha256.

    `kiln_near` int64: group by near hashes and thumbnails; `kiln_similar` int64: that group, closed
    over near embeddings; `cluster` int64: cluster of embeddings, null without one.

    Args:
        db: has views `listed` (id) and `described` (id, and the columns of the describers).
        folder: for thumbnails and embeddings, 256 and 2 x D bytes a picture.
    """
    db.execute(
        "create or replace temp table pictures as "
        "select id, row_number() over (order by id) - 1 as picture "
        "from (select distinct id from listed)"
    )
    ids = db.sql("select id from pictures order by picture").to_arrow_table()["id"]
    count = len(ids)
    near = duplicates.ungrouped(count)
    if name := select.duplicates.perceptual:
        hashes, mirrored = np.zeros((2, count), np.uint64)
        thumbnails = _on_disk(folder / "thumbnails", np.uint8, (count, SIDE, SIDE))
        arrays = {"phash": hashes, "mirrored": mirrored, "thumbnail": thumbnails}
        rows = _fill(db, {f"{name}_{column}": array for column, array in arrays.items()})
        distance = select.duplicates.distance
        near = duplicates.join_near_hashes(near, rows, hashes, mirrored, thumbnails, distance)
    similar = near
    if name := select.duplicates.semantic:
        embeddings, rows = _embeddings(db, name, count, folder)
        similar = duplicates.join_near_embeddings(
            near, rows, embeddings, select.duplicates.min_cosine
        )
    cluster = pa.nulls(count, pa.int64())
    if select.clusters is not None:
        embeddings, rows = _embeddings(db, select.clusters.describer, count, folder)
        numbers = np.full(count, -1)
        numbers[rows] = duplicates.clusters(rows, embeddings, select.clusters.count)
        cluster = pa.array(numbers, mask=numbers < 0)
    columns = {"id": ids, "kiln_near": near, "kiln_similar": similar, "cluster": cluster}
    return pa.table(columns)


def _embeddings(
    db: duckdb.DuckDBPyConnection, name: str, count: int, folder: Path
) -> tuple[NDArray[np.float16], duplicates.Rows]:
    """Embeddings f16 [N, D] of a describer, and the pictures that have one, [M]."""
    query = f"select len({quoted(name)}) from described where {quoted(name)} is not null limit 1"
    width = sum(length for (length,) in db.execute(query).fetchall())
    embeddings = _on_disk(folder / "embeddings", np.float16, (count, max(1, width)))
    return embeddings, _fill(db, {name: embeddings})


def _on_disk(path: Path, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """An array of zeros in a file."""
    return np.memmap(path, dtype, "w+", shape=shape)


def _fill(db: duckdb.DuckDBPyConnection, columns: dict[str, NDArray[Any]]) -> duplicates.Rows:
    """Write described columns to arrays [N, ...]; returns the pictures that have them, [M]."""
    first, *_ = columns
    has = np.zeros(len(columns[first]), bool)
    names = ", ".join(map(quoted, columns))
    query = (
        f"select picture, {names} from described join pictures using (id) "
        f"where {quoted(first)} is not null"
    )
    for batch in db.sql(query).to_arrow_reader(BATCH):
        rows = batch["picture"].to_numpy()
        has[rows] = True
        for name, array in columns.items():
            array[rows] = _values(batch[name]).reshape(-1, *array.shape[1:])
    return np.flatnonzero(has)


def _values(column: pa.Array) -> NDArray[Any]:
    """A column's numbers in one dimension; those of lists and of bytes follow each other."""
    if pa.types.is_binary(column.type):
        return np.frombuffer(b"".join(column.to_pylist()), np.uint8)
    return np.asarray(column.flatten() if pa.types.is_list(column.type) else column)
