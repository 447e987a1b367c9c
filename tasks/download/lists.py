"""Lists of rows as sources: parquet, csv, json and text, read by DuckDB.

Rows are Arrow batches with a hash of each row, in the lists' order. DuckDB refuses a file with a
malformed line, or drops the line. Python then reads csv, jsonl and txt line by line, malformed
lines included; DuckDB is many times faster.

Every kind of source has pieces of rows, and pictures at their places: the protocol `Source`.
"""

from __future__ import annotations

import atexit
import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from functools import cache, partial
from itertools import chain, count
from typing import IO, Any, NamedTuple, Protocol

import duckdb
import numpy as np
import pyarrow as pa
from fsspec import AbstractFileSystem
from numpy.typing import NDArray

from artifacts.records import digest_bytes, digest_json
from configs.errors import Refused, naming
from configs.secrets import one_line, without_secrets
from configs.settings.base_section import Section
from configs.settings.data import DatasetSource, FolderSource, TarsSource, UrlSource, references_of
from tasks import sql_condition
from tasks.download.rows import (
    ALPHA,
    COLUMNS,
    COMPANIONS,
    HASHED,
    additional_of,
    canonical_additional,
    captions_of,
    integer,
    literal,
    row_hash,
    score_of,
    text_of,
)
from tasks.download.source_files import ListedFile, located, open_file, reading
from tasks.sql_condition import check_expression, columns_of, quoted

#: Bytes of a line in memory, as of DuckDB's largest JSON object: a packed file may have one line.
MAX_LINE = 2**24
BUFFER = 2**16  # bytes
#: Characters of a record behind its first line: DuckDB's limit of a row.
MAX_RECORD = 131_072
#: Characters around a URL in a text file.
BLANK = " \t\r\n\v\f"
#: An unpaired surrogate in JSON.
SURROGATE = re.compile(
    r"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]"
)


def csv_header(file: str, delimiter: str) -> list[str]:
    """Names of the columns: the fields of the first line."""
    with _open_text(file) as stream:
        return next(csv.reader(_lines(stream), delimiter=delimiter), [])


def csv_rows(file: str, delimiter: str) -> Iterator[dict[str, str]]:
    """The fields of each row by column; an empty first one of a malformed row."""
    with _open_text(file) as stream:
        lines = _lines(stream)
        header = next(csv.reader(lines, delimiter=delimiter), [])
        for values in _fields(lines, delimiter):
            if values:
                # DuckDB, too, accepts empty values behind those of the header.
                fits = len(values) >= len(header) and not any(values[len(header) :])
                yield dict(zip(header, values if fits else [""], strict=False))


def json_rows(file: str) -> Iterator[dict[str, Any]]:
    """The JSON object of each line; an empty object for a malformed line."""
    with _open_text(file) as stream:
        yield from map(_json_object, filter(str.strip, _lines(stream)))


def json_lines(file: str) -> Iterator[dict[str, str]]:
    """The text of each line; DuckDB finds the malformed lines.

    DuckDB refuses unpaired surrogates, which are replaced.
    """
    with _open_text(file) as stream:
        for line in filter(str.strip, _lines(stream)):
            if SURROGATE.search(line):
                line = text_of(json.dumps(_json_object(line), ensure_ascii=False))
            yield {"json": line}


def text_rows(file: str) -> Iterator[dict[str, str]]:
    """The URL of each line that is not blank; empty for a line that is too long."""
    with _open_text(file) as stream:
        for line in _lines(stream):
            if url := line.strip(BLANK):
                yield {"url": url if len(line) < MAX_LINE else ""}


@contextmanager
def _open_text(file: str) -> Iterator[IO[bytes]]:
    """The unpacked bytes of a file, which is buffered: files of buckets have no readline(size).

    Raises:
        Refused: it is UTF-16, as spreadsheets write text.
    """
    with open_file(file, "infer") as stream, io.BufferedReader(stream, BUFFER) as buffered:
        if buffered.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise Refused(f"source: {file}: it is UTF-16: save it as UTF-8")
        yield buffered


def _lines(stream: IO[bytes]) -> Iterator[str]:
    """The lines of UTF-8 text without the byte order mark, each cut to MAX_LINE."""
    mark = codecs.BOM_UTF8
    is_start = True
    while line := stream.readline(MAX_LINE):
        if is_start:
            yield line.removeprefix(mark).decode(errors="replace")
        mark = b""
        is_start = line.endswith(b"\n")


def _fields(lines: Iterator[str], delimiter: str) -> Iterator[list[str]]:
    """Fields of each record; one empty field for a malformed line.

    A malformed line may have an open quote, which takes the lines behind it. These are read again,
    one by one: an open quote of theirs would take the same lines, and end like the first. Each
    line is thus read three times at most.
    """
    again: list[str] = []
    while True:
        taken: list[str] = []
        rest = _taking(chain(again, lines), taken)
        try:
            for values in csv.reader(rest, delimiter=delimiter, strict=True):
                taken.clear()
                yield values
            return
        except csv.Error:
            # The last line may begin a record of its own, since it ended the other record.
            yield from (_fields_of(line, delimiter) for line in taken[:-1] or taken)
            again = taken[1:][-1:]


def _taking(lines: Iterable[str], taken: list[str]) -> Iterator[str]:
    """The lines, which are added to those that a record has taken.

    Raises:
        csv.Error: the record is too long.
    """
    size = 0
    for line in lines:
        size = size + len(line) if taken else 0
        taken.append(line)
        if size > MAX_RECORD:
            raise csv.Error("a record is too long")
        yield line


def _fields_of(line: str, delimiter: str) -> list[str]:
    """Fields of a record of one line; one empty field if it is malformed."""
    # DuckDB, too, leaves out spaces around quotes.
    in_quotes = rf'(^|{delimiter}) *("[^"]*+(?:""[^"]*+)*+") *(?={delimiter}|[\r\n]|$)'
    for text in (line, re.sub(in_quotes, r"\1\2", line)):
        with suppress(csv.Error):
            return next(csv.reader([text], delimiter=delimiter, strict=True))
    return [""]


def _json_object(line: str) -> dict[str, Any]:
    """The JSON object in `line`; empty if the line is malformed."""
    try:
        value = json.loads(line, parse_int=integer)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


WHERE = "source.where"
BATCH = 50_000  # rows
#: Characters of the texts in a batch of Python's rows: at most 32 MiB in UTF-8.
MOST_CHARACTERS = 2**23
MEMORY = "400MB"  # of DuckDB's buffers
#: The largest row of a csv file in bytes: Python's limit of a field.
MAX_CSV_ROW = 131_072
COMPRESSIONS = ("", ".gz", ".zst")
#: A folder named `score=6` would otherwise replace the column `score` of its files.
OWN_COLUMNS = "hive_partitioning = false"
#: Column of a plan -> the setting that names the list's column.
SETTINGS = {
    "url": "url_column",
    "captions": "caption_column",
    "sha256": "sha256_column",
    "aesthetic_score": "aesthetic_column",
    "mask": "mask_column",
    "control": "control_column",
}
NUMBERS = {f"{u}{n}INT" for u in ("", "U") for n in ("TINY", "SMALL", "BIG", "HUGE")} | {
    *("INTEGER", "UINTEGER", "FLOAT", "DOUBLE", "BOOLEAN")
}


class ListFormat(NamedTuple):
    """One file format of lists."""

    suffixes: tuple[str, ...]
    columns: Callable[[str], list[str]]  # names, of a file
    table: Callable[[str, str], str]  # SQL of all rows, of a file and of its path for DuckDB
    is_json: bool = False  # whether the table's one column `json` has the rows as objects
    #: The rows of the table in a file that DuckDB refuses.
    tolerant: Callable[[str], Iterator[dict[str, str]]] | None = None


class MalformedList(Refused):
    """DuckDB refuses a text file, such as one with a malformed line."""


def read_list(file: str, source: UrlSource) -> Iterator[pa.Table]:
    """Tables of HASHED, in the order of the file.

    Raises:
        MalformedList: DuckDB refuses a text file, perhaps after some tables.
        Refused: the file cannot be read.
    """
    format = FORMATS[source.format]
    with reading(file), connection(file) as (db, path):
        try:
            yield from _read(db, source, format.table(file, path), file)
        except (duckdb.Error, pa.ArrowException, OSError) as error:  # also by an Arrow stream
            if format.tolerant is None:
                raise
            raise MalformedList(f"source: {file}: {one_line(error)}") from None


def read_malformed_list(file: str, source: UrlSource) -> Iterator[pa.Table]:
    """As `read_list`, but Python finds the lines; a malformed line is a row with empty values.

    All rows come from this reader: the two readers number the rows of some files differently.
    """
    format = FORMATS[source.format]
    assert format.tolerant is not None
    table = "lines"
    texts = dict.fromkeys([*named_columns(source).values(), *_condition_columns(source, file)])
    if format.is_json:  # DuckDB reads the values, too: Python writes 1e30 and true in other ways
        valid = "if(json_type(try_cast(json as json)) = 'OBJECT', json, '{}')"
        table = f"(select {valid} as json from lines)"
        texts = {"json": None}
    schema = pa.schema([(name, pa.string()) for name in texts])
    with reading(file), _cursor() as db:
        for lines in _batches(format.tolerant(file), lambda line: line.values()):
            db.register("lines", pa.Table.from_pylist(lines, schema=schema))
            yield from _read(db, source, table, file)


def _read(
    db: duckdb.DuckDBPyConnection, source: UrlSource, table: str, file: str
) -> Iterator[pa.Table]:
    """Tables of HASHED, made from a table with columns of any types."""
    table = chosen(db, source, table, file, source.format)
    selected = _selected(db, source, table, file)
    if not source.additional_columns:
        yield from _hashed(db, selected, source.base_url)
        return
    place = COLUMNS.get_field_index("additional")
    with _cursor() as hashing:  # Python writes the canonical form of further columns
        for batch in db.sql(selected).to_arrow_reader(BATCH):
            texts = [canonical_additional(text) for text in batch["additional"].to_pylist()]
            rows = pa.Table.from_batches([batch]).cast(COLUMNS)
            rows = rows.set_column(place, COLUMNS.field(place), pa.array(texts, pa.string()))
            hashing.register("listed", rows)
            yield from _hashed(hashing, "select * from listed", source.base_url)


def hash_rows(rows: Iterable[dict[str, Any]], base_url: str | None = None) -> Iterator[pa.Table]:
    """Tables of HASHED, made from rows with COLUMNS; missing values are null."""
    canonical = ({**row, "additional": canonical_additional(row.get("additional"))} for row in rows)
    with _cursor() as db:
        for batch in _batches(canonical, lambda row: [*row["captions"], row["additional"] or ""]):
            db.register("listed", pa.Table.from_pylist(batch, schema=COLUMNS))
            yield from _hashed(db, "select * from listed", base_url)


def _batches(
    rows: Iterable[dict[str, Any]], texts: Callable[[dict[str, Any]], Iterable[str]]
) -> Iterator[list[dict[str, Any]]]:
    """Rows that DuckDB's memory holds together, by the lengths of their texts."""
    batch = list[dict[str, Any]]()
    characters = 0
    for row in rows:
        batch.append(row)
        characters += sum(map(len, texts(row)))
        if len(batch) == BATCH // 10 or characters >= MOST_CHARACTERS:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch


@contextmanager
def connection(file: str) -> Iterator[tuple[duckdb.DuckDBPyConnection, str]]:
    """DuckDB, and the path by which it opens `file`, also a remote file or a pattern."""
    fs, path = located(file)
    with _cursor() as db:
        if "file" in fs.protocol and not set("*?[") & set(path):
            yield db, path
            return
        filesystem = _OneFile(fs, path)
        db.register_filesystem(filesystem)
        try:
            suffix = next((end for end in COMPRESSIONS[1:] if path.endswith(end)), "")
            yield db, f"{filesystem.protocol}://list{suffix}"
        except Exception:
            if filesystem.failed:  # DuckDB keeps only the text of its traceback
                raise filesystem.failed[0] from filesystem.failed[0].__cause__
            raise
        finally:
            db.unregister_filesystem(filesystem.protocol)


@contextmanager
def _cursor() -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection of its own to the database of this process."""
    try:
        with _database().cursor() as db:
            yield db
    except (duckdb.InternalException, duckdb.FatalException):
        # A damaged file can break an assertion of DuckDB, after which the database answers nothing.
        _database.cache_clear()
        raise


@cache
def _database() -> duckdb.DuckDBPyConnection:
    """The database of this process, which has no tables: opening a database takes 20 ms."""

    database = duckdb.connect(config={"memory_limit": MEMORY})
    database.execute("set global timezone = 'UTC'")  # times have one text on all machines
    atexit.register(database.close)
    return database


class _OneFile(AbstractFileSystem):
    """One file of any filesystem under a name without secrets and wildcards.

    Attributes:
        failed: errors of the filesystem, in order.
    """

    cachable = False
    numbers = count()

    def __init__(self, fs: AbstractFileSystem, path: str) -> None:
        super().__init__()
        self.protocol = f"kilnlist{next(self.numbers)}"
        self.fs = fs
        self.file = path
        self.failed: list[Exception] = []

    def glob(self, path: str, **_: Any) -> list[str]:
        return [path]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        with self.noting():
            return {**self.fs.info(self.file), "name": path}

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(0, UTC)  # DuckDB's cache needs a time; each name is read once

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        with self.noting():
            return _Noting(self.fs.open(self.file, mode), self)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note an error of the filesystem."""
        try:
            yield
        except Exception as error:
            self.failed.append(error)
            raise


class _Noting:
    """An open file whose errors are noted."""

    def __init__(self, stream: Any, of: _OneFile) -> None:
        self._stream = stream
        self._of = of

    def read(self, size: int = -1) -> bytes:
        with self._of.noting():
            return bytes(self._stream.read(size))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _hashed(
    db: duckdb.DuckDBPyConnection, selected: str, base_url: str | None
) -> Iterator[pa.Table]:
    query = f"select *, {row_hash(base_url)} as hash from ({selected})"
    for batch in db.sql(query).to_arrow_reader(BATCH):
        # DuckDB omits `coalesce` where a parquet file's statistics count no null.
        texts = (batch["url"], batch["captions"].flatten())
        if any(column.null_count for column in texts):
            raise pa.ArrowInvalid("it has nulls in a column whose statistics count none")
        yield pa.Table.from_batches([batch]).cast(HASHED)


class _Values(NamedTuple):
    """SQL of a row's values in a table."""

    columns: dict[str, str]  # column of a plan -> its value
    additional: dict[str, str]  # further column -> its value
    binary: frozenset[str] = frozenset()  # columns of a plan whose values are bytes


def _selected(db: duckdb.DuckDBPyConnection, source: UrlSource, table: str, file: str) -> str:
    """SQL of the rows of COLUMNS in a table of any types."""
    format = FORMATS[source.format]
    additional = source.additional_columns
    columns = {name: getattr(source, setting) for name, setting in SETTINGS.items()}
    for companion in COMPANIONS:
        if getattr(source, companion) != "column":
            columns[companion] = None
    places = {f"reference {n}": column for n, column in enumerate(source.reference_columns)}
    columns |= places
    named = {name: column for name, column in columns.items() if column is not None}
    if format.is_json:
        values = _json_values(named, additional)
    else:
        types = {name: kind for name, kind, *_ in db.execute(f"describe from {table}").fetchall()}
        absent = {*named.values(), *additional} - types.keys()
        # DuckDB, which ignores case, has one of two names that differ by it under another name.
        if absent and (renamed := sorted(absent & set(format.columns(file)))):
            raise Refused(
                f"source: {file} has another column {renamed[0]!r} in other case: rename one of "
                "them"
            )
        sql_condition.require_columns(named_columns(source), [*types], file)
        values = _typed_values(named, additional, types)
        if format.tolerant is not None:  # Python's csv reader knows no null
            kept = {name: f"coalesce({value}, '')" for name, value in values.additional.items()}
            values = values._replace(additional=kept)
    listed = {**dict.fromkeys(columns, "null"), "captions": "[null]", **values.columns}
    binary = values.binary
    caption = _caption("c", "captions" in values.binary)
    texts = f"list_filter({listed['captions']}, lambda c: c is not null)"
    captions = f"list_transform({texts}, lambda c: {caption})"
    struct = ", ".join(f"{literal(name)}: {value}" for name, value in values.additional.items())
    more = f"to_json({{{struct}}})::varchar" if values.additional else "null::varchar"
    mask = literal(ALPHA) if source.mask == ALPHA else _text(listed["mask"], "mask" in binary)
    lists = [
        f"list_transform({listed[name]}, lambda r: {_text('r', name in binary)})" for name in places
    ]
    urls = f"list_filter(flatten([{', '.join(lists)}]), lambda r: r <> '')" if lists else "null"
    place = "{url: r, file: null::varchar, row: null::bigint}"
    references = "null"
    if lists:
        references = (
            f'if(len("references") > 0, list_transform("references", lambda r: {place}), null)'
        )
    control = _text(listed["control"], "control" in binary)
    return f"""
        select url, if(coalesce(len(captions), 0) = 0, [''], captions) as captions,
            nullif(sha256, '') as sha256,
            if(isfinite(score), score, null) as aesthetic_score,
            null::varchar as file, null::bigint as row, additional,
            if(mask = '', null, {{url: mask, file: null::varchar, row: null::bigint}}) as mask,
            if(control = '', null, {{url: control, file: null::varchar, row: null::bigint}})
                as control,
            {references} as "references"
        from (
            select {_text(listed["url"], "url" in binary)} as url, {captions} as captions,
                lower({_digest(listed["sha256"], "sha256" in binary)}) as sha256,
                try_cast({listed["aesthetic_score"]} as double) as score, {more} as additional,
                {mask} as mask, {control} as control, {urls} as "references"
            from {table}
        )
    """


def chosen(
    db: duckdb.DuckDBPyConnection,
    source: UrlSource | DatasetSource,
    table: str,
    file: str,
    format: str = "parquet",
) -> str:
    """SQL of the rows of a table that meet `source.where`.

    A row whose values cannot be compared does not. In formats of text, values are text, and missing
    ones empty.

    Raises:
        Refused: the condition does not fit the columns.
    """
    if source.where is None:
        return table
    table = _comparable(db, source, table, file, format)
    return f"(from {table} where coalesce(try((\n{source.where}\n)), false))"


def _comparable(
    db: duckdb.DuckDBPyConnection,
    source: UrlSource | DatasetSource,
    table: str,
    file: str,
    format: str,
) -> str:
    """SQL of a table with the columns that `source.where` reads. Raises Refused as `chosen`."""
    assert source.where is not None
    is_text = format != "parquet"
    columns = _condition_columns(source, file) if is_text else []
    if FORMATS[format].is_json:
        texts = (f"{_json_text(name)} as {quoted(name)}" for name in columns)
        table = f"(select {', '.join(['json', *texts])} from {table})"
    types = {name: kind for name, kind, *_ in db.execute(f"describe from {table}").fetchall()}
    remedy = f"columns of {format} are text, try_cast(x as double) is a number" if is_text else None
    with naming(WHERE, remedy):
        check_expression(source.where, types, WHERE, without_secrets(file))
    if columns:
        texts = (f"coalesce({quoted(name)}, '') as {quoted(name)}" for name in columns)
        table = f"(select * replace ({', '.join(texts)}) from {table})"
    return table


def require_value(file: str, source: UrlSource | DatasetSource) -> None:
    """Raise Refused, with the first error, if `source.where` has one on a row of a list."""
    assert source.where is not None
    format = source.format if isinstance(source, UrlSource) else "parquet"
    with reading(file), connection(file) as (db, path):
        table = _comparable(db, source, FORMATS[format].table(file, path), file, format)
        sql_condition.require_value(db, source.where, WHERE, table)


def _condition_columns(source: UrlSource | DatasetSource, file: str) -> list[str]:
    """The columns that `source.where` reads, as a list spells them; the condition ignores case."""
    if source.where is None:
        return []
    format = source.format if isinstance(source, UrlSource) else "parquet"
    columns: list[str] = []
    with suppress(Refused):  # of a list whose first line is malformed
        columns = FORMATS[format].columns(file)
    spelt = {name.lower(): name for name in columns} | {name: name for name in columns}
    named = columns_of(source.where, WHERE)
    return [spelt.get(name, spelt.get(name.lower(), name)) for name in named]


def kept_rows(file: str, source: DatasetSource) -> NDArray[np.bool_] | None:
    """Whether each row of a parquet file meets `source.where`: bool [N]; None: all do.

    Raises Refused.
    """
    if source.where is None:
        return None
    kept = np.zeros(count_rows(file, "parquet"), bool)
    with reading(file), connection(file) as (db, path):
        table = f"read_parquet({literal(path)}, {OWN_COLUMNS}, file_row_number = true)"
        rows = chosen(db, source, table, file)
        kept[db.execute(f"select file_row_number as n from {rows}").fetchnumpy()["n"]] = True
    return kept


def count_rows(file: str, format: str) -> int:
    """The rows of a list, malformed ones included. Raises Refused if it cannot be read."""
    known = FORMATS[format]
    with reading(file), connection(file) as (db, path):
        try:
            [[rows]] = db.execute(f"select count(*) from {known.table(file, path)}").fetchall()
            return int(rows)
        except duckdb.Error:
            if known.tolerant is None:
                raise
            return sum(1 for _ in known.tolerant(file))


def _json_values(named: Mapping[str, str], additional: Sequence[str]) -> _Values:
    """SQL of values in the column `json` of objects; a caption alone becomes a list."""
    values = {name: _json_text(column) for name, column in named.items()}
    for name in (name for name in named if name.startswith("reference ")):
        path = _path(named[name])
        many = f"json_extract_string(json, {literal(f'{path}[*]')})"
        kind = f"json_type(json, {literal(path)})"
        alone = f"if({kind} = 'OBJECT', null, {values[name]})"
        values[name] = f"coalesce(if({kind} = 'ARRAY', {many}, [{alone}]), [])"
    if "captions" in named:
        path = _path(named["captions"])
        kind = f"json_type(json, {literal(path)})"
        items = literal(f"{path}[*]")
        # What is no text, as an object, would otherwise be trained on as JSON.
        is_nested = _is_nested("json_type(c)")
        texts = f"list_filter(json_extract(json, {items}), lambda c: not {is_nested})"
        many = f"list_transform({texts}, lambda c: json_extract_string(c, '$'))"
        caption = values["captions"]
        no_number = f"{caption} = 'NaN' and {kind} = 'DOUBLE'"
        caption = f"if({_is_nested(kind)} or {no_number}, null, {caption})"
        values["captions"] = f"if({kind} = 'ARRAY', {many}, [{caption}])"
    return _Values(values, {name: f"json -> {literal(_path(name))}" for name in additional})


def _json_text(column: str) -> str:
    return f"json ->> {literal(_path(column))}"


def _is_nested(kind: str) -> str:
    return f"{kind} in ('OBJECT', 'ARRAY')"


def _typed_values(
    named: Mapping[str, str], additional: Sequence[str], types: Mapping[str, str]
) -> _Values:
    """SQL of values in columns of DuckDB's `types`; a caption alone becomes a list."""
    values = {name: quoted(column) for name, column in named.items()}
    if "captions" in named and not types[named["captions"]].endswith("]"):
        caption = values["captions"]
        if types[named["captions"]] in ("FLOAT", "DOUBLE"):
            caption = f"if(isnan({caption}), null, {caption})"
        values["captions"] = f"[{caption}]"
    for name in (name for name in named if name.startswith("reference ")):
        is_list = types[named[name]].endswith("]")
        values[name] = f"coalesce({values[name]}, [])" if is_list else f"[{values[name]}]"
    if "aesthetic_score" in named and types[named["aesthetic_score"]] not in NUMBERS:
        values["aesthetic_score"] += "::varchar"
    kept = {name: quoted(name) for name in additional}
    kept |= {name: _decoded(kept[name]) for name in additional if types[name] == "BLOB"}
    binary = frozenset(name for name in named if types[named[name]].startswith("BLOB"))
    return _Values(values, kept, binary)


def _path(column: str) -> str:
    return f"$.{quoted(column)}"


def _text(value: str, binary: bool) -> str:
    """SQL of a value as text. Some writers of parquet leave text without its type."""
    return f"coalesce({_decoded(value) if binary else f'({value})::varchar'}, '')"


def _decoded(value: str) -> str:
    """SQL of bytes as text: UTF-8, else with an escape for each byte, so that URLs differ."""
    return f"coalesce(try(decode({value})), ({value})::varchar)"


def _caption(value: str, binary: bool) -> str:
    """SQL of a caption as text: bytes that are no UTF-8 have U+FFFD for each beyond ASCII."""
    digits = f"substr(hex({value}), (2 * i + 1)::int, 2)"
    letter = f"if({digits} < '80', chr(('0x' || {digits})::int), '\ufffd')"
    letters = f"list_transform(range(octet_length({value})), lambda i: {letter})"
    decoded = f"coalesce(try(decode({value})), array_to_string({letters}, ''), '')"
    return decoded if binary else _text(value, binary)


def _digest(value: str, binary: bool) -> str:
    """SQL of a sha256 as hex; a binary column may have its bytes."""
    text = _text(value, binary)
    return f"if(octet_length({value}) = 32, hex({value}), {text})" if binary else text


def _packed(*suffixes: str) -> tuple[str, ...]:
    return tuple(suffix + end for suffix in suffixes for end in COMPRESSIONS)


def require_columns(settings: UrlSource | DatasetSource, format: str, file: str) -> None:
    """Raise Refused unless a list has the configured columns, and text in those of text.

    Captions and references may be lists of text.
    """
    named = named_columns(settings)
    columns = FORMATS[format].columns(file)
    sql_condition.require_columns(named, columns, file)
    if settings.where is not None:
        for name in _condition_columns(settings, file):
            sql_condition.require_columns({WHERE: name}, columns, file)
        with reading(file), connection(file) as (db, path):
            chosen(db, settings, FORMATS[format].table(file, path), file, format)
    if format != "parquet":
        return
    schema = parquet_schema(file)
    texts = ["source.url_column", "source.caption_column"]
    lists = {"source.caption_column"}
    if isinstance(settings, UrlSource):
        texts += [f"source.{companion}_column" for companion in COMPANIONS]
        lists |= {setting for setting in named if setting.startswith("source.reference_columns")}
        texts += lists - {"source.caption_column"}
    for setting in texts:
        if setting not in named:
            continue
        kind = schema.field(named[setting]).type
        has_list = setting in lists
        if pa.types.is_nested(getattr(kind, "value_type", kind) if has_list else kind):
            raise Refused(
                f"{file}: column {named[setting]!r} holds {kind!s:.100}, not text: write the "
                "text to a column of its own",
                setting=setting,
            )


def parquet_schema(file: str) -> pa.Schema:
    """The columns of a parquet file, from its footer. Raises Refused."""
    import pyarrow.parquet as pq

    with reading(file), open_file(file) as stream:
        return pq.ParquetFile(stream).schema_arrow


def _csv(delimiter: str, *suffixes: str) -> ListFormat:
    """Separated values with a header line, UTF-8."""

    def columns(file: str) -> list[str]:
        with reading(file):
            return csv_header(file, delimiter)

    def table(file: str, path: str) -> str:
        types = ", ".join(f"{literal(name)}: 'VARCHAR'" for name in csv_header(file, delimiter))
        return (
            f"read_csv({literal(path)}, columns = {{{types}}}, delim = {literal(delimiter)}, "
            "quote = '\"', escape = '\"', header = true, auto_detect = false, "
            f"max_line_size = {MAX_CSV_ROW}, {OWN_COLUMNS})"
        )

    rows = partial(csv_rows, delimiter=delimiter)
    return ListFormat(_packed(*suffixes), columns, table, tolerant=rows)


def _json(*suffixes: str, is_lines: bool) -> ListFormat:
    """JSON objects: one for each line, or an array of them."""
    kind = "newline_delimited" if is_lines else "array"

    def columns(file: str) -> list[str]:
        with reading(file), connection(file) as (db, path):
            with _open_text(file) as stream:
                start = stream.read(BUFFER).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
            if start == (b"[" if is_lines else b"{"):
                words = "json, not jsonl" if is_lines else "jsonl, not json"
                raise Refused(
                    f"source: {file} looks like {words}: change source.format, or convert the file"
                )
            if is_lines:
                names = list(next(json_rows(file), {}))
            else:
                keys = f"select json_keys(json) from {table(file, path)} limit 1"
                names = [name for row in db.execute(keys).fetchall() for name in row[0]]
        if not names:
            raise Refused(f"source: {file}: its first line is not a JSON object")
        return names

    def table(file: str, path: str) -> str:
        return f"read_json_objects({literal(path)}, format = {literal(kind)}, {OWN_COLUMNS})"

    tolerant = json_lines if is_lines else None
    return ListFormat(_packed(*suffixes), columns, table, is_json=True, tolerant=tolerant)


def _text_table(file: str, path: str) -> str:
    lines = "columns = {'line': 'VARCHAR'}, delim = '\x01', quote = '', escape = ''"
    options = f"{lines}, header = false, auto_detect = false, {OWN_COLUMNS}"
    read = f"read_csv({literal(path)}, {options})"
    trimmed = f"trim(line, {literal(BLANK)})"
    return f"(select {trimmed} as url from {read} where {trimmed} <> '')"


#: The setting source.format -> the format.
FORMATS = {
    "parquet": ListFormat(
        (".parquet",),
        lambda file: list(parquet_schema(file).names),
        lambda _, path: f"read_parquet({literal(path)}, {OWN_COLUMNS})",
    ),
    "csv": _csv(",", ".csv"),
    "tsv": _csv("\t", ".tsv", ".tab"),
    "jsonl": _json(".jsonl", ".ndjson", is_lines=True),
    "json": _json(".json", is_lines=False),
    "txt": ListFormat(_packed(".txt"), lambda _: ["url"], _text_table, tolerant=text_rows),
}


class ServedAt(NamedTuple):
    """The base of relative URLs and the private hosts to allow, while a source is open."""

    base_url: str | None = None
    allow_hosts: tuple[str, ...] = ()  # host or host:port with a private address


Reader = Callable[[], Iterator[pa.Table]]  # tables of HASHED


def _no_rows() -> Iterator[pa.Table]:
    return iter(())


def _nothing() -> None:
    pass


class Piece(NamedTuple):
    """Consecutive rows of a source, such as a file: read again only if it changed."""

    identity: str  # sha256 (hex) of names, stamps and settings: equal ones have equal rows
    read: Reader  # raises Refused, MalformedList
    read_malformed: Reader = _no_rows  # of all rows, after a MalformedList
    #: The number of its rows before `source.where` has dropped some; None without a condition.
    listed_rows: Callable[[], int] | None = None
    #: Raises Refused, with the first error, if `source.where` has one on a row.
    require_value: Callable[[], None] = _nothing


class PictureLocation(NamedTuple):
    """Where a source has a picture."""

    file: str  # the picture, or the parquet file or tar that has it
    row: int | None  # number in a parquet file; offset of a tar's header in bytes; else None


class Source(Protocol):
    """One kind of source."""

    def check(self) -> None:
        """Raise Refused if the source is unusable. Runs before the first stage, so cheap."""

    def pieces(self) -> Iterator[Piece]:
        """All rows, in order; nothing is read before `Piece.read`. Raises Refused."""

    def pictures(self, places: Iterable[PictureLocation]) -> Iterator[bytes | None]:
        """The pictures embedded at `places`, in the source's order; None if a picture is gone.

        Raises Refused.
        """
        return iter(())

    def masks(self, places: Iterable[PictureLocation]) -> Iterator[bytes | None]:
        """The masks embedded at `places`, as `pictures`."""
        return self.pictures(places)

    def controls(self, places: Iterable[PictureLocation]) -> Iterator[bytes | None]:
        """The control pictures embedded at `places`, as `pictures`."""
        return self.pictures(places)

    def references(self, places: Iterable[PictureLocation]) -> Iterator[bytes | None]:
        """The references embedded at `places`, as `pictures`."""
        return self.pictures(places)

    def open(self) -> AbstractContextManager[ServedAt]:
        """Make the rows' URLs reachable, by a local server if they need it. Raises Refused."""
        return nullcontext(ServedAt())


def named_columns(
    settings: UrlSource | FolderSource | DatasetSource | TarsSource,
) -> dict[str, str]:
    """{setting: column} of the columns that are configured."""
    named = {f"source.{name}": value for name, value in settings if name.endswith("_column")}
    for companion in COMPANIONS:
        if getattr(settings, companion) != "column":
            named.pop(f"source.{companion}_column", None)
    for several in ("additional_columns", "reference_columns"):
        more = enumerate(getattr(settings, several, ()))
        named |= {f"source.{several}.{n}": column for n, column in more}
    return {setting: column for setting, column in named.items() if column is not None}


def piece_of(
    settings: Section, files: list[ListedFile], read: Reader, read_malformed: Reader = _no_rows
) -> Piece:
    """The piece of some files, identified by the settings and the files' names and stamps."""
    meaning = settings.model_dump(mode="json", exclude={"path", "port"})
    # Plans of before these settings keep their keys.
    if meaning.get("where") is None:
        meaning.pop("where", None)
    for companion in COMPANIONS:
        if meaning.get(companion) is None:
            meaning = {n: value for n, value in meaning.items() if not n.startswith(companion)}
    if not references_of(settings):
        meaning = {n: value for n, value in meaning.items() if not n.startswith("reference")}
    identity = digest_json([meaning, *(file.stamp for file in files)])
    if not isinstance(settings, UrlSource | DatasetSource) or settings.where is None:
        return Piece(identity, read, read_malformed)
    file = files[0].name
    count = partial(count_rows, file, meaning.get("format", "parquet"))
    return Piece(identity, read, read_malformed, count, partial(require_value, file, settings))


#: No pictures beside a picture.
NOTHING: Mapping[str, tuple[bytes, PictureLocation]] = {}


def embedded_row(
    picture: bytes | None,
    place: PictureLocation,
    settings: FolderSource | DatasetSource | TarsSource,
    values: Mapping[str, Any] | None,
    caption: str | None = None,
    beside: Mapping[str, tuple[bytes, PictureLocation]] = NOTHING,
    references: Iterable[tuple[bytes, PictureLocation]] = (),
) -> dict[str, Any]:
    """The row of COLUMNS of a picture in the source, identified by its content.

    Args:
        values: those of the row's columns; None: no table describes the picture.
        caption: the caption, if it is not among the values.
        beside: name in COMPANIONS -> that picture in the source, and its place.
        references: its references in the source, and their places.
    """
    columns = settings.additional_columns
    named = values or {}
    text = named.get(settings.caption_column or "") if caption is None else caption
    row: dict[str, Any] = {
        "url": "",
        "captions": captions_of(text),
        "aesthetic_score": score_of(named.get(settings.aesthetic_column or "")),
        "additional": None if values is None else additional_of(columns, values),
    }
    if picture is None:
        return row
    if settings.mask == ALPHA:
        row["mask"] = {"url": ALPHA}
    row |= {name: _embedded(*placed) for name, placed in beside.items()}
    row["references"] = [_embedded(*reference) for reference in references] or None
    sha256 = digest_bytes(picture)
    return {**row, "url": f"sha256:{sha256}", "sha256": sha256, **place._asdict()}


def _embedded(picture: bytes, place: PictureLocation) -> dict[str, Any]:
    return {"url": f"sha256:{digest_bytes(picture)}", **place._asdict()}
