"""Tables of descriptions: one parquet file per image shard and describer, and all of them together.

A table has a row per sample of its image shard, in the order of the tar: row, id (sha256 of the
downloaded picture), input (digest of what the describer read of it), reason (why it has no values,
or null), then the values. A row whose input an earlier table has is copied from there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from artifacts.filesystems import ask_at_once
from artifacts.records import FileEntry, digest_json, open_checked
from artifacts.store import Artifact, Store
from tasks.build_or_reuse import recent_artifacts

STAGE: Literal["describe"] = "describe"
#: Increment when tables change.
VERSION = 1
SUFFIX = ".parquet"
INPUT_BYTES = 16
FIELDS = [
    ("row", pa.int32()),
    ("id", pa.binary(32)),
    ("input", pa.binary(INPUT_BYTES)),
    ("reason", pa.string()),
]
HALF = pa.list_(pa.float16())
WIDE = pa.list_(pa.float32())
#: In the inputs of an artifact, before the names of its describers.
NAMED = "describers."


def table_key(tar: str, describer: str) -> str:
    """Key (sha256 hex) of the table of an image shard: sha256 of its tar, digest of a describer."""
    facts = {"stage": STAGE, "version": VERSION, "tar": tar, "describer": describer}
    return digest_json(facts)


def write_table(
    path: str, values: Mapping[str, pa.DataType], rows: Iterable[Mapping[str, Any]]
) -> None:
    """Write a table with equal bytes for equal rows, dicts of FIELDS and the values' names."""
    schema = pa.schema([*FIELDS, *((f"value_{name}", kind) for name, kind in values.items())])
    pq.write_table(pa.Table.from_pylist([*rows], schema), path, compression="zstd")


def read_table(url: str, sha256: str, columns: Collection[str] | None = None) -> pa.Table:
    """Columns of a committed table; None: all. Raises Damaged for another sha256."""
    with open_checked(url, sha256) as stream:
        data = pa.BufferReader(stream.read())
    chosen = None if columns is None else [*columns]
    return pq.ParquetFile(data, pre_buffer=False).read(chosen, use_threads=False)


def describers_of(artifact: Artifact) -> dict[str, str]:
    """Name -> digest of the describers of a describe artifact."""
    inputs = artifact.manifest["inputs"]
    named = {n.removeprefix(NAMED): d for n, d in inputs.items() if n.startswith(NAMED)}
    return dict(sorted(named.items()))


def tables_of(artifact: Artifact) -> dict[str, dict[str, FileEntry]]:
    """Sha256 of a tar -> digest of a describer -> table, in the order of the digests of tars."""
    tables = defaultdict[str, dict[str, FileEntry]](dict)
    for entry in artifact.files:
        tables[entry.meta["tar"]][entry.meta["describer"]] = entry
    return dict(sorted(tables.items()))


def described(
    artifact: Artifact, db: duckdb.DuckDBPyConnection, columns: Collection[str] | None = None
) -> duckdb.DuckDBPyRelation:
    """As read_described, read once into the temporary table `kiln_described` of `db`."""
    db.register("kiln_reader", read_described(artifact, columns))
    db.execute("create or replace temp table kiln_described as from kiln_reader")
    db.unregister("kiln_reader")
    return db.table("kiln_described")


def read_described(
    artifact: Artifact, columns: Collection[str] | None = None
) -> pa.RecordBatchReader:
    """One row per sample of each image shard, streamed in the order of (tar, row).

    Columns: tar (sha256 hex), row, id (32 bytes), then each describer's values, named as
    `column_name` says; null where a describer could not read the picture. Embeddings are f32 lists.

    Args:
        columns: of the values to read; None: all. Embeddings are most of the bytes.

    Raises:
        Damaged: a table has other bytes than committed.
    """
    tables = tables_of(artifact)
    chosen = _chosen(artifact, columns)
    read = partial(_joined, artifact, chosen)
    joined = ask_at_once(artifact.store.fs, read, tables.items())
    first = next(joined)

    def batches() -> Iterator[pa.RecordBatch]:
        yield from first.to_batches()
        for table in joined:
            yield from table.to_batches()

    return pa.RecordBatchReader.from_batches(first.schema, batches())


def _chosen(artifact: Artifact, columns: Collection[str] | None) -> dict[str, tuple[str, str]]:
    """Column -> digest of its describer, and its name in that table."""
    values = artifact.summary["values"]
    named = {
        column: (digest, value)
        for name, digest in describers_of(artifact).items()
        for column, value in values[name].items()
    }
    return {c: place for c, place in named.items() if columns is None or c in columns}


def _joined(
    artifact: Artifact,
    chosen: Mapping[str, tuple[str, str]],
    item: tuple[str, Mapping[str, FileEntry]],
) -> pa.Table:
    """The chosen columns of an image shard's tables, whose rows are in one order."""
    tar, entries = item
    wanted = defaultdict[str, list[str]](list)
    for digest, value in chosen.values():
        wanted[digest].append(f"value_{value}")
    keys = next(iter(entries))
    wanted[keys] = ["row", "id", *wanted[keys]]
    tables = {
        digest: read_table(artifact.url(entries[digest].path), entries[digest].sha256, names)
        for digest, names in wanted.items()
    }
    rows = len(tables[keys])
    columns: dict[str, Any] = {"tar": pa.array([tar] * rows, pa.string())}
    columns |= {name: tables[keys][name] for name in ("row", "id")}
    for column, (digest, value) in chosen.items():
        values = tables[digest][f"value_{value}"]
        # DuckDB reads no half-precision numbers of Arrow.
        columns[column] = values.cast(WIDE) if values.type == HALF else values
    return pa.table(columns).combine_chunks()


@dataclass(frozen=True)
class EarlierTables:
    """Tables of an earlier artifact whose image shards are gone; a few of their pictures stayed.

    Where image shards end depends on their content, so a changed picture replaces one shard.
    """

    artifact: Artifact
    tables: Mapping[str, Mapping[str, FileEntry]]  # as tables_of, without present image shards

    @classmethod
    def find(
        cls, store: Store, tars: Collection[str], describers: Collection[str]
    ) -> EarlierTables | None:
        """Those of the newest artifact with some of these image shards, or else of the newest.

        Args:
            tars: sha256 of the present image shards.
            describers: digests of those that describe now.
        """
        newest = None
        for recent in filter(None, recent_artifacts(store, STAGE)):
            if not set(describers_of(recent).values()) & set(describers):
                continue
            artifact = store.load(STAGE, recent.key)
            if artifact is None:
                continue
            tables = tables_of(artifact)
            gone = {tar: tables[tar] for tar in tables if tar not in tars}
            earlier = cls(artifact, gone)
            if len(gone) < len(tables):
                return earlier
            newest = newest or earlier
        return newest

    def beside(self, images: Artifact, tars: Collection[str]) -> dict[str, list[str]]:
        """Sha256 of an image shard -> those of the earlier shards with some of its pictures.

        Args:
            tars: sha256 of image shards of `images`.
        """
        if not self.tables:
            return {}
        fs = images.store.fs
        gone = [*self.tables]
        ids = [*ask_at_once(fs, self._ids, gone)]
        owners = np.repeat(np.arange(len(gone)), [len(some) for some in ids])
        every = np.concatenate(ids)
        order = np.argsort(every, kind="stable")
        every = every[order]
        owners = owners[order]
        lists = {_stem(e): e for e in images.files if e.path.endswith(SUFFIX)}
        shards = [e for e in images.files if e.sha256 in tars and _stem(e) in lists]
        rows = [lists[_stem(entry)] for entry in shards]
        beside = dict[str, list[str]]()
        for shard, own in zip(
            shards, ask_at_once(fs, partial(_listed_ids, images), rows), strict=True
        ):
            places = np.minimum(np.searchsorted(every, own), len(every) - 1)
            shared = Counter(owners[places[every[places] == own]].tolist())
            beside[shard.sha256] = [gone[number] for number, _ in shared.most_common()]
        return beside

    def _ids(self, tar: str) -> NDArray[np.uint64]:
        """The pictures of an earlier image shard."""
        entry = next(iter(self.tables[tar].values()))
        table = read_table(self.artifact.url(entry.path), entry.sha256, ["id"])
        return _numbers(table["id"].to_pylist())

    def places(self, tars: Iterable[str], describer: str) -> list[tuple[str, str]]:
        """(URL, sha256) of a describer's tables of earlier image shards."""
        entries = (self.tables[tar].get(describer) for tar in tars)
        return [(self.artifact.url(e.path), e.sha256) for e in entries if e is not None]


def _listed_ids(images: Artifact, entry: FileEntry) -> NDArray[np.uint64]:
    """The pictures of an image shard, by the table beside its tar."""
    listed = read_table(images.url(entry.path), entry.sha256, ["sha256"])["sha256"].to_pylist()
    return _numbers([bytes.fromhex(sha256) for sha256 in listed if sha256])


def _stem(entry: FileEntry) -> str:
    """What the files of a shard have in common: its key."""
    return entry.path.split(".")[-3]


def _numbers(ids: list[bytes]) -> NDArray[np.uint64]:
    """The first 8 bytes of each id."""
    return np.frombuffer(b"".join(one[:8] for one in ids), ">u8").astype(np.uint64)
