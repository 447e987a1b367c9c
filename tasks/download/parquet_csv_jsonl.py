"""Read rows from parquet, csv and jsonl files: a whole file or a span of it."""

from __future__ import annotations

import csv
import difflib
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, NamedTuple, Protocol

import fsspec
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from artifacts.digests import parse_json
from artifacts.remote_clients import is_of_client
from configs.redact_errors_and_logs import one_line
from tasks.download.errors import SourceError

#: Errors of a file's content; EOFError and zlib.error are those of a damaged gzip file.
_UNREADABLE = (OSError, ValueError, ImportError, EOFError, csv.Error, zlib.error)


class Span(NamedTuple):
    """Consecutive rows of one file, in the half-open range [start, stop).

    Positions count rows in a parquet file and bytes in a text file.
    """

    file: str
    start: int
    stop: int


class ListFormat(Protocol):
    """Reader of one file format."""

    suffixes: tuple[str, ...]

    def columns(self, file: str) -> list[str]:
        """Names of the columns. Raises SourceError."""

    def rows(
        self, file: str, columns: Collection[str], start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """(position, next position, values) of each row in [start, stop).

        A malformed line of a text file is a row whose values are empty.

        Raises:
            SourceError: the file cannot be read.
        """


class ParquetList:
    """Parquet: positions are row numbers, and a span reads only its row groups."""

    suffixes: tuple[str, ...] = (".parquet",)

    def __init__(self, batch_size: int = 4096) -> None:
        self.batch_size = batch_size  # rows in memory at a time

    def columns(self, file: str) -> list[str]:
        import pyarrow.parquet as pq

        with reading(file), fsspec.open(file, "rb") as stream:
            return list(pq.ParquetFile(stream).schema_arrow.names)

    def rows(
        self, file: str, columns: Collection[str], start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, int, dict[str, Any]]]:
        import pyarrow.parquet as pq

        with reading(file), fsspec.open(file, "rb") as stream:
            table = pq.ParquetFile(stream, buffer_size=2**20)
            stop = table.metadata.num_rows if stop is None else stop
            groups, position = _row_groups(table.metadata, start, stop)
            batches = table.iter_batches(self.batch_size, row_groups=groups, columns=list(columns))
            for batch in batches:
                skip = max(0, start - position)
                kept = batch.slice(skip, max(0, stop - position - skip))
                for row, values in enumerate(kept.to_pylist(), start=position + skip):
                    yield row, row + 1, values
                position += len(batch)


class CsvList:
    """Comma-separated values with a header line, UTF-8: positions are byte offsets."""

    suffixes: tuple[str, ...] = (".csv", ".csv.gz")

    def columns(self, file: str) -> list[str]:
        with reading(file), _open_text(file) as stream:
            return self._header(stream)

    def rows(
        self, file: str, columns: Collection[str], start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, int, dict[str, Any]]]:
        with reading(file), _open_text(file) as stream:
            header = self._header(stream)
            lines = _Lines(stream, max(start, stream.tell()))
            for values in _csv_rows(lines):
                row_start, lines.row_start = lines.row_start, lines.position
                if not values:
                    continue
                named = dict(zip(header, values, strict=False))
                yield row_start, lines.position, {name: named.get(name) for name in columns}
                if stop is not None and lines.position >= stop:
                    return

    def _header(self, stream: IO[bytes]) -> list[str]:
        return next(csv.reader(_Lines(stream, 0)), [])


class JsonlList:
    """One JSON object per line, UTF-8: positions are byte offsets."""

    suffixes: tuple[str, ...] = (".jsonl", ".jsonl.gz", ".ndjson")

    def columns(self, file: str) -> list[str]:
        _, _, first = next(self._objects(file, 0), (0, 0, {}))
        if not first:
            raise SourceError(f"source: {file}: its first line is not a JSON object")
        return list(first)

    def rows(
        self, file: str, columns: Collection[str], start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, int, dict[str, Any]]]:
        for row_start, row_stop, values in self._objects(file, start):
            yield row_start, row_stop, {name: values.get(name) for name in columns}
            if stop is not None and row_stop >= stop:
                return

    def _objects(self, file: str, start: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
        with reading(file), _open_text(file) as stream:
            lines = _Lines(stream, start)
            for line in lines:
                row_start, lines.row_start = lines.row_start, lines.position
                if line.strip():
                    yield row_start, lines.position, _json_object(line)


FORMATS: dict[str, ListFormat] = {
    "parquet": ParquetList(),
    "csv": CsvList(),
    "jsonl": JsonlList(),
}


def list_files(path: str, suffixes: tuple[str, ...], setting: str = "source.path") -> list[str]:
    """Sorted files at `path`: a file, a folder or a glob, local or at an fsspec URL.

    Raises:
        SourceError: no file matches, or the location cannot be listed.
    """
    with reading(path):
        fs, root = url_to_fs(path)
        if is_glob(root):
            found = [name for name in fs.glob(root) if not fs.isdir(name)]
        elif fs.isdir(root):
            found = [name for name in fs.find(root) if name.lower().endswith(suffixes)]
        else:
            found = [root] if fs.exists(root) else []
        if not found:
            check_absent(fs, root)
            kinds = ", ".join(suffixes)
            raise SourceError(f"{setting}: {path}: no such file, or no {kinds} files in the folder")
        is_local = "file" in fs.protocol
        return sorted(found if is_local else map(str, map(fs.unstrip_protocol, found)))


def check_absent(fs: AbstractFileSystem, path: str) -> None:
    """Raise the error that `isdir` and `exists` hide, unless `path` does not exist."""
    with suppress(FileNotFoundError):
        fs.info(path)


def is_glob(path: str) -> bool:
    """Whether `path` is a pattern. In an http URL a question mark starts the query."""
    wildcards = "*" if path.startswith(("http://", "https://")) else "*?["
    return any(wildcard in path for wildcard in wildcards)


def require_columns(wanted: dict[str, str], present: Sequence[str], file: str) -> None:
    """Raise SourceError unless every column of {setting: column} is present in `file`."""
    for setting, column in wanted.items():
        if column not in present:
            near = difflib.get_close_matches(column, present, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(present)}"
            raise SourceError(f"{setting}: {file} has no column {column!r} ({hint})")


def join_spans(spans: Iterable[Span]) -> list[Span]:
    """The same rows with adjacent spans merged; the order is kept."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].file == span.file and joined[-1].stop == span.start:
            span = Span(span.file, joined.pop().start, span.stop)
        joined.append(span)
    return joined


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Convert the errors of reading `path` to a one-line SourceError."""
    from pyarrow import ArrowException

    try:
        yield
    except SourceError:
        raise
    except FileNotFoundError:
        raise SourceError(f"source: {path}: no such file or folder") from None
    except (*_UNREADABLE, ArrowException) as error:
        raise SourceError(f"source: {path}: cannot be read: {one_line(error)}") from None
    except Exception as error:
        if not is_of_client(error):
            raise
        raise SourceError(f"source: {path}: cannot be reached: {one_line(error)}") from None


class _Lines:
    """Iterator of a binary stream's lines as text; `position` is the next line's byte offset."""

    def __init__(self, stream: IO[bytes], start: int) -> None:
        self.stream = stream
        if start != stream.tell():
            stream.seek(start)
        self.position = self.row_start = start

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self.stream.readline()
        if not line:
            raise StopIteration
        # A byte order mark is not part of the first column's name.
        text = line.removeprefix(b"\xef\xbb\xbf") if self.position == 0 else line
        self.position += len(line)
        return text.decode(errors="replace")


def _open_text(file: str) -> Any:
    return fsspec.open(file, "rb", compression="infer")


def _csv_rows(lines: Iterable[str]) -> Iterator[list[str]]:
    """Fields of each row; one empty field if the row is malformed."""
    reader = csv.reader(lines)
    while True:
        try:
            yield next(reader)
        except StopIteration:
            return
        except csv.Error:
            yield [""]


def _json_object(line: str) -> dict[str, Any]:
    """The JSON object in `line`; empty if the line is malformed."""
    try:
        value = parse_json(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _row_groups(metadata: Any, start: int, stop: int) -> tuple[list[int], int]:
    """Indices of the row groups with rows in [start, stop), and the first row of these groups."""
    groups: list[int] = []
    first_row, position = start, 0
    for number in range(metadata.num_row_groups):
        following = position + metadata.row_group(number).num_rows
        if position < stop and following > start:
            first_row = position if not groups else first_row
            groups.append(number)
        position = following
    return groups, first_row
