"""Read lists of rows with DuckDB, as Arrow batches with a hash of each row, in the lists' order."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
from fsspec import AbstractFileSystem

from configs.secrets import one_line
from tasks.download.list_files import located, open_file, reading, require_columns
from tasks.download.read_malformed_lists import (
    BLANK,
    csv_header,
    csv_rows,
    first_byte,
    json_lines,
    json_rows,
    text_rows,
)
from tasks.download.row_fields_and_hash import (
    COLUMNS,
    HASHED,
    canonical_additional,
    literal,
    row_hash,
)
from tasks.download.stage_errors import SourceError

BATCH = 50_000  # rows
#: Of the texts in a batch of Python's rows: at most 32 MiB in UTF-8.
MOST_CHARACTERS = 2**23
MEMORY = "400MB"  # of DuckDB's buffers
#: The largest row of a csv file in bytes: Python's limit of a field.
MAX_CSV_ROW = 131_072
COMPRESSIONS = ("", ".gz", ".zst")
#: A folder named `score=6` would otherwise replace the column `score` of its files.
OWN_COLUMNS = "hive_partitioning = false"
#: Column of a plan -> the setting that names the list's column.
SETTINGS = {
    "url": "source.url_column",
    "captions": "source.caption_column",
    "sha256": "source.sha256_column",
    "aesthetic_score": "source.aesthetic_column",
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


class MalformedList(SourceError):
    """DuckDB refuses a text file, such as one with a malformed line."""


def read_list(
    file: str,
    format: ListFormat,
    columns: Mapping[str, str | None],
    base_url: str | None,
    additional: Sequence[str],
) -> Iterator[pa.Table]:
    """Tables of HASHED, in the order of the file.

    Args:
        columns: `url`, `captions`, `sha256` and `aesthetic_score` -> the file's column or None.
        additional: further columns to keep.

    Raises:
        MalformedList: DuckDB refuses a text file, perhaps after some tables.
        SourceError: the file cannot be read.
    """
    with reading(file), connection(file) as (db, path):
        try:
            table = format.table(file, path)
            yield from _read(db, format, table, columns, base_url, additional, file)
        except (duckdb.Error, pa.ArrowException, OSError) as error:  # also by an Arrow stream
            if format.tolerant is None:
                raise
            raise MalformedList(f"source: {file}: {one_line(error)}") from None


def read_malformed_list(
    file: str,
    format: ListFormat,
    columns: Mapping[str, str | None],
    base_url: str | None,
    additional: Sequence[str],
) -> Iterator[pa.Table]:
    """As `read_list`, but Python finds the lines; a malformed one is a row whose values are empty.

    All rows are of this reader, since the two number the rows of some files differently.
    """
    assert format.tolerant is not None
    table, texts = "lines", dict.fromkeys((*filter(None, columns.values()), *additional))
    if format.is_json:  # DuckDB reads the values, too: Python writes 1e30 and true in other ways
        valid = "if(json_type(try_cast(json as json)) = 'OBJECT', json, '{}')"
        table, texts = f"(select {valid} as json from lines)", {"json": None}
    schema = pa.schema([(name, pa.string()) for name in texts])
    with reading(file), _cursor() as db:
        for lines in _batches(format.tolerant(file), lambda line: line.values()):
            db.register("lines", pa.Table.from_pylist(lines, schema=schema))
            yield from _read(db, format, table, columns, base_url, additional, file)


def _read(
    db: duckdb.DuckDBPyConnection,
    format: ListFormat,
    table: str,
    columns: Mapping[str, str | None],
    base_url: str | None,
    additional: Sequence[str],
    file: str,
) -> Iterator[pa.Table]:
    """Tables of HASHED, of a table of any types."""
    selected = _selected(db, format, table, columns, additional, file)
    yield from (_hashed_with_additional if additional else _hashed)(db, selected, base_url)


def hash_rows(rows: Iterable[dict[str, Any]], base_url: str | None = None) -> Iterator[pa.Table]:
    """Tables of HASHED, of rows of COLUMNS; missing values are null."""
    canonical = ({**row, "additional": canonical_additional(row.get("additional"))} for row in rows)
    with _cursor() as db:
        for batch in _batches(canonical, lambda row: [*row["captions"], row["additional"] or ""]):
            db.register("given", pa.Table.from_pylist(batch, schema=COLUMNS))
            yield from _hashed(db, "select * from given", base_url)


def _batches(
    rows: Iterable[dict[str, Any]], texts: Callable[[dict[str, Any]], Iterable[str]]
) -> Iterator[list[dict[str, Any]]]:
    """Rows that DuckDB's memory holds together, by the lengths of their texts."""
    batch, characters = list[dict[str, Any]](), 0
    for row in rows:
        batch.append(row)
        characters += sum(map(len, texts(row)))
        if len(batch) == BATCH // 10 or characters >= MOST_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@contextmanager
def connection(file: str) -> Iterator[tuple[duckdb.DuckDBPyConnection, str]]:
    """DuckDB, and the path by which it opens `file`, also a remote one or one with wildcards."""
    fs, path = located(file)
    with _cursor() as db:
        if "file" in fs.protocol and not set("*?[") & set(path):
            yield db, path
            return
        one = _OneFile(fs, path)
        db.register_filesystem(one)
        try:
            suffix = next((end for end in COMPRESSIONS[1:] if path.endswith(end)), "")
            yield db, f"{one.protocol}://list{suffix}"
        except Exception:
            if one.failed:  # DuckDB keeps of it the text alone, of the whole traceback
                raise one.failed[0] from one.failed[0].__cause__
            raise
        finally:
            db.unregister_filesystem(one.protocol)


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
    """The database of this process, which has no tables: opening one takes 20 ms."""

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
        self.fs, self.file = fs, path
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
        self._stream, self._of = stream, of

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


def _hashed_with_additional(
    db: duckdb.DuckDBPyConnection, selected: str, base_url: str | None
) -> Iterator[pa.Table]:
    """As `_hashed`, of further columns in their canonical form, which Python writes."""
    place = COLUMNS.get_field_index("additional")
    with _cursor() as hashing:
        for batch in db.sql(selected).to_arrow_reader(BATCH):
            texts = [canonical_additional(text) for text in batch["additional"].to_pylist()]
            found = pa.Table.from_batches([batch]).cast(COLUMNS)
            found = found.set_column(place, COLUMNS.field(place), pa.array(texts, pa.string()))
            hashing.register("given", found)
            yield from _hashed(hashing, "select * from given", base_url)


class _Values(NamedTuple):
    """SQL of a row's values in a table."""

    columns: dict[str, str]  # column of a plan -> its value
    additional: dict[str, str]  # further column -> its value
    binary: frozenset[str] = frozenset()  # columns of a plan whose values are bytes


def _selected(
    db: duckdb.DuckDBPyConnection,
    format: ListFormat,
    table: str,
    columns: Mapping[str, str | None],
    additional: Sequence[str],
    file: str,
) -> str:
    """SQL of the rows of COLUMNS in a table of any types."""
    named = {name: column for name, column in columns.items() if column is not None}
    if format.is_json:
        values = _json_values(named, additional)
    else:
        types = {name: kind for name, kind, *_ in db.execute(f"describe from {table}").fetchall()}
        _refuse_names_by_case([*named.values(), *additional], types, format, file)
        require_columns({SETTINGS[name]: named[name] for name in named}, [*types], file)
        require_columns(additional_settings(additional), [*types], file)
        values = _typed_values(named, additional, types)
        if format.tolerant is not None:  # Python's csv reader knows no null
            kept = {name: f"coalesce({value}, '')" for name, value in values.additional.items()}
            values = values._replace(additional=kept)
    listed = {**dict.fromkeys(columns, "null"), "captions": "[null]", **values.columns}
    binary, caption = values.binary, _caption("c", "captions" in values.binary)
    given = f"list_filter({listed['captions']}, lambda c: c is not null)"
    captions = f"list_transform({given}, lambda c: {caption})"
    struct = ", ".join(f"{literal(name)}: {value}" for name, value in values.additional.items())
    more = f"to_json({{{struct}}})::varchar" if values.additional else "null::varchar"
    return f"""
        select url, if(coalesce(len(captions), 0) = 0, [''], captions) as captions,
            nullif(sha256, '') as sha256,
            if(isfinite(score), score, null) as aesthetic_score,
            null::varchar as file, null::bigint as row, additional
        from (
            select {_text(listed["url"], "url" in binary)} as url, {captions} as captions,
                lower({_digest(listed["sha256"], "sha256" in binary)}) as sha256,
                try_cast({listed["aesthetic_score"]} as double) as score, {more} as additional
            from {table}
        )
    """


def _refuse_names_by_case(
    wanted: Iterable[str], types: Mapping[str, str], format: ListFormat, file: str
) -> None:
    """Raise SourceError for a column that DuckDB, which ignores case, has under another name."""
    absent = set(wanted) - types.keys()
    if absent and (renamed := sorted(absent & set(format.columns(file)))):
        raise SourceError(
            f"source: {file} has another column {renamed[0]!r} in other case: rename one of them"
        )


def _json_values(named: Mapping[str, str], additional: Sequence[str]) -> _Values:
    """SQL of values in the column `json` of objects; a caption alone becomes a list."""
    values = {name: f"json ->> {literal(_path(column))}" for name, column in named.items()}
    if "captions" in named:
        path = _path(named["captions"])
        kind, items = f"json_type(json, {literal(path)})", literal(f"{path}[*]")
        # What is no text, as an object, would otherwise be trained on as JSON.
        texts = (
            f"list_filter(json_extract(json, {items}), lambda c: not {_is_nested('json_type(c)')})"
        )
        many = f"list_transform({texts}, lambda c: json_extract_string(c, '$'))"
        one = values["captions"]
        no_number = f"{one} = 'NaN' and {kind} = 'DOUBLE'"
        one = f"if({_is_nested(kind)} or {no_number}, null, {one})"
        values["captions"] = f"if({kind} = 'ARRAY', {many}, [{one}])"
    return _Values(values, {name: f"json -> {literal(_path(name))}" for name in additional})


def _is_nested(kind: str) -> str:
    return f"{kind} in ('OBJECT', 'ARRAY')"


def _typed_values(
    named: Mapping[str, str], additional: Sequence[str], types: Mapping[str, str]
) -> _Values:
    """SQL of values in columns of DuckDB's `types`; a caption alone becomes a list."""
    values = {name: _quoted(column) for name, column in named.items()}
    if "captions" in named and not types[named["captions"]].endswith("]"):
        one = values["captions"]
        if types[named["captions"]] in ("FLOAT", "DOUBLE"):
            one = f"if(isnan({one}), null, {one})"
        values["captions"] = f"[{one}]"
    if "aesthetic_score" in named and types[named["aesthetic_score"]] not in NUMBERS:
        values["aesthetic_score"] += "::varchar"
    kept = {
        name: _decoded(_quoted(name)) if types[name] == "BLOB" else _quoted(name)
        for name in additional
    }
    binary = frozenset(name for name in named if types[named[name]].startswith("BLOB"))
    return _Values(values, kept, binary)


def _quoted(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


def _path(column: str) -> str:
    return f"$.{_quoted(column)}"


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


def additional_settings(columns: Sequence[str]) -> dict[str, str]:
    """{setting: column} of the columns that source.additional_columns names."""
    return {f"source.additional_columns.{n}": column for n, column in enumerate(columns)}


def _packed(*suffixes: str) -> tuple[str, ...]:
    return tuple(suffix + end for suffix in suffixes for end in COMPRESSIONS)


def _parquet_columns(file: str) -> list[str]:
    return list(_parquet_schema(file).names)


def require_text(wanted: Mapping[str, str], file: str) -> None:
    """Raise SourceError unless each column of {setting: column} of a parquet file can be text.

    Captions may be lists of text.
    """
    schema = _parquet_schema(file)
    for setting, column in wanted.items():
        kind = schema.field(column).type
        is_caption = setting == SETTINGS["captions"]
        if pa.types.is_nested(getattr(kind, "value_type", kind) if is_caption else kind):
            raise SourceError(
                f"{setting}: {file}: column {column!r} holds {kind!s:.100}, not text: write the "
                "text to a column of its own"
            )


def _parquet_schema(file: str) -> pa.Schema:
    import pyarrow.parquet as pq

    with reading(file), open_file(file) as stream:
        return pq.ParquetFile(stream).schema_arrow


def _parquet_table(file: str, path: str) -> str:
    return f"read_parquet({literal(path)}, {OWN_COLUMNS})"


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


def _json(kind: str, *suffixes: str, is_lines: bool) -> ListFormat:
    """JSON objects: one for each line, or an array of them."""

    def columns(file: str) -> list[str]:
        with reading(file), connection(file) as (db, path):
            if first_byte(file) == (b"[" if is_lines else b"{"):
                words = "json, not jsonl" if is_lines else "jsonl, not json"
                raise SourceError(
                    f"source: {file} looks like {words}: change source.format, or convert the file"
                )
            first = next(json_rows(file), {}) if is_lines else _keys(db, table(file, path))
        if not first:
            raise SourceError(f"source: {file}: its first line is not a JSON object")
        return list(first)

    def table(file: str, path: str) -> str:
        return f"read_json_objects({literal(path)}, format = {literal(kind)}, {OWN_COLUMNS})"

    tolerant = json_lines if is_lines else None
    return ListFormat(_packed(*suffixes), columns, table, is_json=True, tolerant=tolerant)


def _keys(db: duckdb.DuckDBPyConnection, table: str) -> list[str]:
    found = db.execute(f"select json_keys(json) from {table} limit 1").fetchone()
    return list(found[0]) if found else []


def _text_columns(file: str) -> list[str]:
    return ["url"]


def _text_table(file: str, path: str) -> str:
    lines = "columns = {'line': 'VARCHAR'}, delim = '\x01', quote = '', escape = ''"
    options = f"{lines}, header = false, auto_detect = false, {OWN_COLUMNS}"
    read = f"read_csv({literal(path)}, {options})"
    trimmed = f"trim(line, {literal(BLANK)})"
    return f"(select {trimmed} as url from {read} where {trimmed} <> '')"


#: The setting source.format -> the format.
FORMATS = {
    "parquet": ListFormat((".parquet",), _parquet_columns, _parquet_table),
    "csv": _csv(",", ".csv"),
    "tsv": _csv("\t", ".tsv", ".tab"),
    "jsonl": _json("newline_delimited", ".jsonl", ".ndjson", is_lines=True),
    "json": _json("array", ".json", is_lines=False),
    "txt": ListFormat(_packed(".txt"), _text_columns, _text_table, tolerant=text_rows),
}
