"""The shard plan of a source: its rows cut into shards, as parquet with one row group a shard.

A shard plan is an artifact; its pieces are shards of the store. A piece holds the shards that end
within one file of the source, or one part of a folder. Rows behind its last shard begin the next
piece. A piece's key has the file's stamp and the rows that it begins with, so only new files of a
grown source are read.

A listed URL may have a signature or a password, and stores hold no secrets: the columns of SECRET
are encrypted (AES-GCM) with a key that stays in the local cache.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from fsspec.core import url_to_fs

from artifacts.errors import caching
from artifacts.models import cache_folder
from artifacts.records import FileEntry, digest_bytes, digest_json, distrust, read_checked
from artifacts.store import SHARDS, Artifact, Draft, KeyParts, Shard, Store
from configs.errors import Failed, Refused, UserError
from runtimes.data.loader import Prefetch
from tasks.build_or_reuse import build_or_reuse
from tasks.download.lists import MalformedList, Piece, Source
from tasks.download.rows import COMPANIONS, HASH_SIZE, HASHED, shard_ends
from tasks.download.source_files import reading

#: Columns that may have secrets; those that few sources have are absent where all values are null.
RARE = (*COMPANIONS, "references")
SECRET = ["url", "file", *RARE]
#: The column for the encrypted columns, whose Arrow stream is in the first row of a shard.
SEALED = pa.field("sealed", pa.binary())
#: The column of a digest of each row's references, null without any. Plans are compared by it and
#: the hash, which does not see references. Files of rows without references lack it.
REFERENCES = pa.field("references_digest", pa.binary(HASH_SIZE))
#: Row groups of a file: a reader of one group parses the description of all.
GROUPS = 128
NONCE = 12  # bytes
#: Codec of each column with redundancy: hashes and encrypted bytes have none.
CODECS = dict.fromkeys(["captions.list.element", "sha256", "additional"], "zstd")


class PlanWriter:
    """Writes row groups to the files `0.parquet`, `1.parquet`... of a folder."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        self.key = key
        self.files: list[str] = []
        self._writer: Any = None
        self._groups = 0
        self._has_references = False  # whether a row had some

    def seal(self, shard: pa.Table) -> bytes:
        """The encrypted columns of a shard; may be called in another thread than `write`."""
        absent = [name for name in RARE if shard[name].null_count == len(shard)]
        table = shard.select([name for name in SECRET if name not in absent])
        sink = pa.BufferOutputStream()
        packed = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(sink, table.schema, options=packed) as stream:
            stream.write_table(table.combine_chunks())
        nonce = os.urandom(NONCE)
        return nonce + _cipher(self.key).encrypt(nonce, sink.getvalue().to_pybytes(), None)

    def write(self, shard: pa.Table, sealed: bytes) -> dict[str, Any]:
        """Write a shard's rows of HASHED; returns its entry of the index.

        Args:
            sealed: of `seal`.
        """
        first = pa.array([sealed], SEALED.type)
        rest = pa.nulls(len(shard) - 1, SEALED.type)
        table = shard.drop_columns(SECRET).append_column(SEALED, pa.chunked_array([first, rest]))
        references = _digests_of_references(shard)
        if any(references) and not self._has_references:
            self._has_references = True
            self._groups = GROUPS  # a file has one schema: another one begins
        if self._has_references:
            table = table.append_column(REFERENCES, pa.array(references, REFERENCES.type))
        if self._writer is None or self._groups == GROUPS:
            self.close()
            self._groups = 0
            self.files.append(str(self.folder / f"{len(self.files)}.parquet"))
            self._writer = pq.ParquetWriter(
                self.files[-1],
                table.schema,
                compression=CODECS,
                use_dictionary=False,
                write_statistics=False,
                write_page_checksum=True,
            )
        self._writer.write_table(table, row_group_size=len(shard))
        group = self._groups
        self._groups += 1
        digest = hashlib.sha256(_joined(shard["hash"].combine_chunks())).digest()
        name = Path(self.files[-1]).name
        entry = {"digest": digest, "rows": len(shard), "file": name, "group": group}
        if any(references):
            named = [None if one is None else one.hex() for one in references]
            entry["references"] = bytes.fromhex(digest_json(named))
        return entry

    def close(self) -> None:
        """Finish the last file."""
        if self._writer is not None:
            self._writer.close()


def read_group(file: str, group: int, key: str) -> pa.Table:
    """The rows of HASHED of one row group. Raises Refused if it cannot be read."""
    with _reading(file) as parquet:
        table = parquet.read_row_group(group, use_threads=False)
    sealed = table[SEALED.name][0].as_py()
    try:
        data = _cipher(key).decrypt(sealed[:NONCE], sealed[NONCE:], None)
    except InvalidTag:
        raise Refused(f"source: {file} has another machine's key: run again") from None
    opened = pa.ipc.open_stream(data).read_all()
    for name in RARE:
        if name not in opened.column_names:
            opened = opened.append_column(name, pa.nulls(len(opened), HASHED.field(name).type))
    for name in SECRET:
        table = table.append_column(name, opened[name])
    return table.select(HASHED.names)


def _digests_of_references(shard: pa.Table) -> list[bytes | None]:
    """A digest of the URLs of each row's references, in order; None of a row without any."""
    named = shard["references"]
    if named.null_count == len(named):
        return [None] * len(named)
    urls = ([place["url"] for place in places or ()] for places in named.to_pylist())
    return [bytes.fromhex(digest_json(own)) if own else None for own in urls]


def read_hashes(file: str, group: int) -> list[bytes]:
    """The hash of each row of one row group, then the digest of its references, if it has some.

    They need no key. Raises Refused.
    """
    with _reading(file) as parquet:
        columns = [name for name in ("hash", REFERENCES.name) if name in parquet.schema_arrow.names]
        table = parquet.read_row_group(group, columns=columns, use_threads=False)
    hashes = table["hash"].to_pylist()
    if len(columns) == 1:
        return list(hashes)
    references = table[REFERENCES.name].to_pylist()
    return [row_hash + (own or b"") for row_hash, own in zip(hashes, references, strict=True)]


@contextmanager
def _reading(file: str) -> Iterator[pq.ParquetFile]:
    try:
        with reading(file), fsspec.open(file, "rb") as stream:
            yield pq.ParquetFile(stream, pre_buffer=False, page_checksum_verification=True)
    except Refused:
        distrust_file(file)
        raise


def distrust_file(file: str) -> None:
    """Have the next run check a file of a plan, which is built again if it is damaged."""
    distrust(*url_to_fs(file))


def plan_key() -> str:
    """The key (base64) of this machine's plans; made once, and readable by its owner only.

    Raises Refused if it is damaged.
    """
    path = cache_folder() / "plan.key"
    if not path.exists():
        with caching(path.parent):
            _write_key(path)
    key = path.read_text(errors="replace")
    try:
        _cipher(key)
    except ValueError:
        raise Refused(f"source: the key {path} is damaged: delete it") from None
    return key


def _write_key(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent) as beside:  # mode 600
        beside.write(base64.b64encode(AESGCM.generate_key(256)))
        beside.flush()
        os.fsync(beside.fileno())
        with suppress(FileExistsError):  # another process was first
            os.link(beside.name, path)


def key_id(key: str) -> str:
    """A name of a key that does not disclose it."""
    return digest_bytes(f"plan {key}".encode())[:16]


def _cipher(key: str) -> AESGCM:
    return AESGCM(base64.b64decode(key))


STAGE = "plan"
VERSION = 8
INDEX = "shards.parquet"
#: Row groups whose hashes are kept while rows of many groups are read.
RECENT_GROUPS = 64
#: Tables that are read while one is written.
READ_AHEAD = 2
#: Columns of an index: sha256 of the hashes of a shard's rows, and the place of the row group.
#: `references` is a digest of the rows' references, null without any; it is absent if all are null.
INDEX_SCHEMA = pa.schema(
    [
        ("digest", pa.binary(32)),
        ("rows", pa.int64()),
        ("file", pa.string()),
        ("group", pa.int32()),
        ("references", pa.binary(32)),
    ]
)
DIGESTS = ("digest", "references")
Begin = Callable[[KeyParts], object]
log = logging.getLogger("kiln")


class Span(NamedTuple):
    """Consecutive rows of a plan: those in [start, stop) of a row group."""

    file: str  # URL
    group: int
    start: int
    stop: int


@dataclass(frozen=True)
class ShardSpec:
    """One shard to download: its key, its row count and its rows, a row group as planned.

    Args:
        references: a digest of its rows' references; None without any.
        repeat: number of earlier shards with the same rows and other references.
    """

    key: str
    rows: int
    spans: tuple[Span, ...]
    references: bytes | None = None
    repeat: int = 0


@dataclass(frozen=True)
class DownloadPlan:
    """A source's rows, cut into shards; it holds the places of the rows only."""

    source_digest: str  # sha256 (hex) over the digests of all shards, in order
    rows: int
    shards: tuple[ShardSpec, ...]  # each key once
    artifact: Artifact = field(compare=False, repr=False)
    layout: str | None = None  # sha256 over the shards' keys, if they do not follow from the rows


def is_readable(plan: Artifact) -> bool:
    """Whether this machine made the plan: its rows have secrets, which only its key decrypts."""
    return bool(plan.manifest["settings"]["key"] == key_id(plan_key()))


def place_rows(plan: DownloadPlan, own: DownloadPlan) -> DownloadPlan:
    """A plan's shards, with their rows at the places of another plan of the source.

    Args:
        plan: perhaps from another machine: hashes of rows need no key.
        own: the plan of this machine; the source may have changed in between.

    Raises Refused if the source no longer has a row with its references.
    """
    planned = {(spec.key, spec.references): spec for spec in own.shards}
    theirs = {(spec.key, spec.references) for spec in plan.shards}
    lost = [spec for spec in plan.shards if (spec.key, spec.references) not in planned]
    others = (spec for spec in own.shards if (spec.key, spec.references) not in theirs)
    places = _places(others) if lost else {}
    if any(row_hash not in places for row_hash, _ in planned_hashes(lost)):
        places = _places(own.shards)  # it may be a repetition of another shard's row
    shards = []
    for spec in plan.shards:
        if (spec.key, spec.references) not in planned:
            try:
                spans = [places[row_hash] for row_hash, _ in planned_hashes([spec])]
            except KeyError:
                raise Refused(
                    "source: it no longer has all rows that this download was sent for: run again"
                ) from None
            spec = replace(spec, spans=join_spans(spans))
        shards.append(planned.get((spec.key, spec.references), spec))
    return replace(plan, shards=tuple(shards))


def _places(shards: Iterable[ShardSpec]) -> dict[bytes, Span]:
    """The first place of each row."""
    places: dict[bytes, Span] = {}
    for row_hash, span in planned_hashes(shards):
        places.setdefault(row_hash, span)
    return places


def planned_hashes(shards: Iterable[ShardSpec]) -> Iterator[tuple[bytes, Span]]:
    """The hash of each row of shards, as `read_hashes`, and its place. Raises Refused."""
    read = lru_cache(RECENT_GROUPS)(read_hashes)
    for file, group, start, stop in (span for shard in shards for span in shard.spans):
        hashes = read(file, group)[start:stop]
        yield from ((h, Span(file, group, n, n + 1)) for n, h in enumerate(hashes, start))


def read_spans(spans: Iterable[Span], key: str) -> pa.Table:
    """The rows of HASHED at spans; each row group is read once. Raises Refused."""
    groups: dict[tuple[str, int], list[tuple[int, Span]]] = {}
    for number, span in enumerate(spans):
        groups.setdefault(span[:2], []).append((number, span))
    tables: dict[int, pa.Table] = {}
    for (file, group), numbered in groups.items():
        rows = read_group(file, group, key)
        for number, span in numbered:
            tables[number] = rows.slice(span.start, span.stop - span.start)
    return pa.concat_tables([HASHED.empty_table(), *(tables[n] for n in sorted(tables))])


def join_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same rows with adjacent spans merged; the order is kept."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1][:2] == span[:2] and joined[-1].stop == span.start:
            span = span._replace(start=joined.pop().start)
        joined.append(span)
    return tuple(joined)


def plan_shards(
    source: Source, store: Store, shard_size: int, shard_key: Callable[[str], str], begin: Begin
) -> DownloadPlan:
    """The plan of a source: from the store if nothing changed, else a new plan.

    Args:
        shard_size: average rows of a shard.
        shard_key: returns the key of a shard, given the digest of its rows.
        begin: called before the plan is looked for; it records that a run needs it.

    Raises:
        Refused: the source cannot be read, or has no rows.
        Failed, Away: as `build_or_reuse`.
    """
    pieces = list(source.pieces())
    key = plan_key()
    settings = {"shard_size": shard_size, "key": key_id(key)}
    inputs = {"source": digest_json([piece.identity for piece in pieces])}
    parts = KeyParts(STAGE, VERSION, settings, inputs)
    begin(parts)
    try:
        artifact = build_or_reuse(
            store, parts, lambda draft: _Builder(draft, shard_size, key).build(pieces), parents={}
        ).load(store)
    except Failed as error:
        if isinstance(error.__cause__, UserError):  # the stage `download` puts its name before it
            raise error.__cause__ from None
        raise
    return read_plan(artifact, shard_key)


def read_plan(artifact: Artifact, shard_key: Callable[[str], str]) -> DownloadPlan:
    """A plan from the store; the source is not asked. See plan_shards."""
    index = _read_index(artifact.read(INDEX))
    folder = artifact.store.url_of(f"{STAGE}/{SHARDS}")
    shards: list[ShardSpec] = []
    known: dict[bytes, list[bytes | None]] = {}  # digest of rows -> those of their references
    places = zip(*(index[name].to_pylist() for name in INDEX_SCHEMA.names), strict=True)
    for digest, rows, file, group, references in places:
        before = known.setdefault(digest, [])
        if references in before:
            log.warning("download: %d rows repeat an earlier shard and are skipped", rows)
            continue
        repeat = len(before)
        before.append(references)
        key = shard_key(name_of_rows(digest.hex(), repeat))
        spans = (Span(f"{folder}/{file}", group, 0, rows),)
        shards.append(ShardSpec(key, rows, spans, references, repeat))
    rows = sum(shard.rows for shard in shards)
    source_digest = hashlib.sha256(b"".join(index["digest"].to_pylist())).hexdigest()
    layout = None
    if any(shard.repeat for shard in shards):  # the rows alone do not tell them from repetitions
        layout = digest_json([shard.key for shard in shards])
    return DownloadPlan(source_digest, rows, tuple(shards), artifact, layout)


def name_of_rows(digest: str, repeat: int) -> str:
    """What a shard's key is of: its rows' digest, and its number among shards of equal rows.

    A number instead of the references: with others, the shard stays the same.
    """
    return f"{digest} {repeat}" if repeat else digest


class _Builder:
    """Builds a plan piece by piece."""

    def __init__(self, draft: Draft, shard_size: int, key: str) -> None:
        self.draft = draft
        self.store = draft.store
        self.shard_size = shard_size
        self.key = key
        self.settings = digest_json([VERSION, shard_size, key_id(key)])

    def build(self, pieces: list[Piece]) -> dict[str, Any]:
        """Add all pieces and the index to the draft; returns the summary."""
        rest: dict[str, Any] | None = None  # the rows behind the last shard of a piece
        dropped = 0
        most_references = 0
        index = [INDEX_SCHEMA.empty_table()]
        read = 0
        for piece in pieces:
            key = digest_json([self.settings, piece.identity, rest and rest["content"]])
            shard = self.store.shard(STAGE, key)
            if shard is None:
                read = read + 1
                try:
                    shard = self._commit(key, piece, piece.read(), rest)
                except MalformedList:
                    shard = self._commit(key, piece, piece.read_malformed(), rest)
            self.draft.add_shard(shard)
            files = {entry.path.split(".", 2)[2]: entry for entry in shard.files}
            index.append(self._index(files))
            dropped += shard.meta.get("dropped", 0)
            most_references = max(most_references, shard.meta.get("most_references", 0))
            rest = shard.meta["rest"]
            if rest is not None:
                place = {**rest["place"], "file": files[rest["place"]["file"]].path}
                rest = {"content": rest["content"], "place": place}
        if rest is not None:
            last = {n: bytes.fromhex(v) if n in DIGESTS else v for n, v in rest["place"].items()}
            index.append(pa.Table.from_pylist([last], schema=INDEX_SCHEMA))
        shards = pa.concat_tables(index)
        if not len(shards):
            for piece in pieces:
                piece.require_value()
            where = f" that meet source.where ({dropped:,} do not)" if dropped else ""
            raise Refused(f"source: it has no rows{where}")
        self.draft.write(INDEX, _index_file(shards))
        rows = pc.sum(shards["rows"]).as_py()
        counts = {"rows": rows, "shards": len(shards), **({"dropped": dropped} if dropped else {})}
        if most_references:
            counts["most_references"] = most_references
        return {**counts, "run": {"pieces": len(pieces), "read": read}}

    def _commit(
        self, key: str, piece: Piece, tables: Iterator[pa.Table], rest: dict[str, Any] | None
    ) -> Shard:
        """Read a piece of the source and commit it.

        Args:
            tables: its rows.
            rest: None, or `place` (of INDEX_SCHEMA, the digest as hex) and `content` (sha256 hex of
                all columns) of the rows behind the last shard of the piece before.
        """
        with (
            tempfile.TemporaryDirectory(prefix="kiln-") as scratch,
            ThreadPoolExecutor(1) as sealer,  # both it and the reader release the interpreter lock
            Prefetch(tables, READ_AHEAD) as ahead,
        ):
            writer = PlanWriter(Path(scratch), self.key)
            index: list[dict[str, Any]] = []
            rows: list[pa.Table] = []
            if rest is not None:
                url = self.store.shard_url(STAGE, rest["place"]["file"])
                rows = [read_group(url, rest["place"]["group"], self.key)]
            kept = 0
            most_references = 0
            for table in ahead:
                kept += len(table)
                counts = pc.list_value_length(table["references"])
                most_references = max(most_references, pc.max(counts).as_py() or 0)
                *shards, behind = _cut(pa.concat_tables([*rows, table]), self.shard_size)
                sealed = sealer.map(writer.seal, shards)
                index += map(writer.write, shards, sealed)
                rows = [behind]
            meta: dict[str, Any] = {"rest": None}
            if piece.listed_rows is not None:
                meta["dropped"] = piece.listed_rows() - kept
            if most_references:
                meta["most_references"] = most_references
            if rows and len(rows[0]):
                place = writer.write(rows[0], writer.seal(rows[0]))
                place = {n: v.hex() if n in DIGESTS else v for n, v in place.items()}
                # A digest of values: the buffers of equal Arrow tables differ behind nulls.
                values = [{**row, "hash": row["hash"].hex()} for row in rows[0].to_pylist()]
                values = [{n: v for n, v in row.items() if n not in RARE or v} for row in values]
                meta["rest"] = {"content": digest_json(values), "place": place}
            writer.close()
            file = Path(scratch, INDEX)
            file.write_bytes(_index_file(pa.Table.from_pylist(index, schema=INDEX_SCHEMA)))
            files = {f".{Path(name).name}": name for name in (*writer.files, str(file))}
            return self.store.commit_shard(STAGE, key, files, meta)

    def _index(self, files: dict[str, FileEntry]) -> pa.Table:
        """The shards of a piece, whose files have other names in the store. Raises Damaged."""
        own = files[INDEX]
        root = self.store.shards_path(STAGE)
        index = _read_index(read_checked(self.store.fs, root, own.path, own.sha256))
        paths = pa.array([files[name].path for name in index["file"].to_pylist()], pa.string())
        return index.set_column(index.schema.get_field_index("file"), "file", paths)


def _cut(rows: pa.Table, average: int) -> Iterator[pa.Table]:
    """The shards of `rows`, then the rows behind them."""
    prefixes = np.frombuffer(_joined(rows["hash"].combine_chunks()), ">u4")[:: HASH_SIZE // 4]
    ends = shard_ends(prefixes, average)
    for start, end in zip([0, *ends], [*ends, len(rows)], strict=True):
        yield rows.slice(start, end - start)


def rows_digest(hashes: Iterable[bytes]) -> str:
    """sha256 (hex) of the hashes of rows, in order."""
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def _joined(hashes: pa.Array) -> memoryview:
    """The bytes of an array of hashes, without a copy."""
    data = hashes.buffers()[2] or b""
    return memoryview(data)[HASH_SIZE * hashes.offset : HASH_SIZE * (hashes.offset + len(hashes))]


def _read_index(data: bytes) -> pa.Table:
    # pre_buffer leaves the bytes to a thread of Arrow, which can outlive the interpreter.
    index = pq.ParquetFile(BytesIO(data), pre_buffer=False).read(use_threads=False)
    if "references" in index.column_names:
        return index
    field = INDEX_SCHEMA.field("references")
    return index.append_column(field, pa.nulls(len(index), field.type))


def _index_file(index: pa.Table) -> bytes:
    table = index
    if index["references"].null_count == len(index):
        table = index.drop_columns("references")
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()
