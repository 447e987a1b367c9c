"""The list side of a data set: what its source said of each downloaded picture, for SQL."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from artifacts.filesystems import ask_at_once
from artifacts.image_shards import ADDITIONAL
from artifacts.records import FileEntry, read_checked
from artifacts.store import Artifact
from tasks.download.rows import literal
from tasks.sql_condition import quoted

SIZES = ("width", "height", "original_width", "original_height")
SCHEMA = pa.schema(
    [
        ("tar", pa.string()),
        ("row", pa.int32()),
        ("id", pa.binary(32)),
        ("url", pa.string()),
        *((size, pa.int32()) for size in SIZES),
        ("caption", pa.string()),
        (ADDITIONAL, pa.string()),
    ]
)
#: The host of a URL, without user and port; empty for an embedded picture.
HOST = r"lower(regexp_extract(url, '^[A-Za-z][A-Za-z0-9+.-]*://(?:[^/?#@]*@)?([^/?#:]+)', 1))"
#: Columns of every list.
OWN_COLUMNS = ("tar", "row", "id", "url", "host", *SIZES, "caption", "caption_length")
#: Kinds of JSON values -> the type of a column that has no others.
TYPES = (
    ({"BIGINT", "UBIGINT"}, "BIGINT"),
    ({"BIGINT", "UBIGINT", "DOUBLE"}, "DOUBLE"),
    ({"BOOLEAN"}, "BOOLEAN"),
)


def listed(images: Artifact, db: duckdb.DuckDBPyConnection) -> duckdb.DuckDBPyRelation:
    """One row per entry of the data set, read once into a temporary table of `db`.

    Columns: tar (sha256 hex of the image shard's tar), row (position in it), id (sha256 of the
    picture, 32 bytes), url (without secrets), host, width, height, original_width, original_height
    (pixels), caption (the first), caption_length (characters), and the source's
    `additional_columns` by their names: BIGINT, DOUBLE or BOOLEAN if all values are, else text.

    Raises:
        Damaged: an image shard's table has other bytes than committed.
    """
    rows = pa.RecordBatchReader.from_batches(SCHEMA, _batches(images))
    db.register("kiln_reader", rows)
    db.execute("create or replace temp table kiln_listed as from kiln_reader")
    db.unregister("kiln_reader")
    computed = {"host": f"{HOST} as host", "caption_length": "length(caption) as caption_length"}
    own = [computed.get(name, name) for name in OWN_COLUMNS]
    further = (_typed(db, name) for name in _names(db))
    return db.sql(f"select {', '.join([*own, *further])} from kiln_listed")


def _batches(images: Artifact) -> Iterator[pa.RecordBatch]:
    """The rows of each image shard with a picture, as SCHEMA."""
    for tar, table in tables_of(images):
        rows = len(table)
        ids = [bytes.fromhex(sha256) for sha256 in table["sha256"].to_pylist()]
        columns = {name: table[name] for name in table.column_names}
        columns |= {
            "tar": pa.array([tar] * rows, pa.string()),
            "row": pa.array(range(rows), pa.int32()),
            "id": pa.array(ids, pa.binary(32)),
            ADDITIONAL: columns.get(ADDITIONAL, pa.nulls(rows, pa.string())),
        }
        yield from pa.table([columns[name] for name in SCHEMA.names], SCHEMA).to_batches()


def tables_of(images: Artifact) -> Iterator[tuple[str, pa.Table]]:
    """Sha256 of each tar, and the rows of its pictures, in its order.

    Raises:
        Damaged: as `listed`.
    """
    paths = {entry.path.split(".")[-3]: entry for entry in images.files if _is(entry, ".parquet")}
    tars = [entry for entry in images.files if _is(entry, ".tar")]
    tables = [paths[entry.path.split(".")[-3]] for entry in tars]
    read = ask_at_once(images.store.fs, partial(_table, images), tables)
    yield from zip((tar.sha256 for tar in tars), read, strict=True)


def failures(images: Artifact, url: str) -> Iterator[dict[str, Any]]:
    """The rows of a URL without a picture: their columns of artifacts.image_shards.

    Args:
        url: without secrets.

    Raises:
        Damaged: as `listed`.
    """
    tables = [entry for entry in images.files if _is(entry, ".parquet")]
    for table in ask_at_once(images.store.fs, partial(_read, images), tables):
        is_failed = pc.not_equal(table["status"], "success")
        yield from table.filter(pc.and_(is_failed, pc.equal(table["url"], url))).to_pylist()


def _is(entry: FileEntry, suffix: str) -> bool:
    return entry.path.endswith(suffix)


def _table(images: Artifact, entry: FileEntry) -> pa.Table:
    table = _read(images, entry)
    return table.filter(pc.equal(table["status"], "success"))


def _read(images: Artifact, entry: FileEntry) -> pa.Table:
    data = read_checked(images.store.fs, images.path, entry.path, entry.sha256)
    return pq.ParquetFile(pa.BufferReader(data), pre_buffer=False).read(use_threads=False)


def _names(db: duckdb.DuckDBPyConnection) -> list[str]:
    """The further columns, in order of their names."""
    keys = f"select distinct unnest(json_keys({ADDITIONAL})) as name from kiln_listed order by name"
    return [name for (name,) in db.execute(keys).fetchall()]


def _typed(db: duckdb.DuckDBPyConnection, name: str) -> str:
    """SQL of a further column, typed by all its values."""
    value = f"json_extract_string({ADDITIONAL}, {literal(_path(name))})"
    kinds = f"json_type({ADDITIONAL}, {literal(_path(name))})"
    found = db.execute(f"select distinct {kinds} from kiln_listed").fetchall()
    kept = {kind for (kind,) in found if kind not in (None, "NULL")}
    type_ = next((kind for accepted, kind in TYPES if kept and kept <= accepted), None)
    typed = value if type_ is None else f"try_cast({value} as {type_})"
    return f"{typed} as {quoted(name)}"


def _path(name: str) -> str:
    return f"$.{quoted(name)}"
