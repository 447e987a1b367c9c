"""Read lists of rows from parquet, csv and jsonl files: all of one, or any span of it."""

from __future__ import annotations

import csv
import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, NamedTuple, Protocol
from urllib.parse import urlsplit, urlunsplit

import fsspec
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from artifacts.commit import is_of_client
from tasks.download.errors import SourceError


class Span(NamedTuple):
    """Consecutive rows of one file, from position `start` to before `stop`.

    What a position counts is the format's own: rows of a parquet file, bytes of a text file.
    """

    file: str
    start: int
    stop: int


class ListFormat(Protocol):
    """One file format of lists."""

    suffixes: tuple[str, ...]

    def columns(self, file: str) -> list[str]:
        """Names of the columns; empty where rows name them one by one."""

    def rows(
        self, file: str, columns: Sequence[str], start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """(position, next position, values) of each row, with a few rows in memory at a time."""


class ParquetList:
    """Parquet: positions are row numbers; only the row groups that a span touches are read."""

    suffixes: tuple[str, ...] = (".parquet",)

    def __init__(self, batch_size: int = 4096) -> None:
        self.batch_size = batch_size  # rows in memory at a time

    def columns(self, file: str) -> list[str]:
        import pyarrow.parquet as pq

        with reading(file), fsspec.open(file, "rb") as stream:
            return list(pq.ParquetFile(stream).schema_arrow.names)

    def rows(
        self, file: str, columns: Sequence[str], start: int = 0, stop: int | None = None
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
        self, file: str, columns: Sequence[str], start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, int, dict[str, Any]]]:
        with reading(file), _open_text(file) as stream:
            header = self._header(stream)
            lines = _Lines(stream, max(start, stream.tell()))
            for values in csv.reader(lines):
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
    """One JSON object a line, UTF-8: positions are byte offsets."""

    suffixes: tuple[str, ...] = (".jsonl", ".jsonl.gz", ".ndjson")

    def columns(self, file: str) -> list[str]:
        first = next(self._objects(file, 0), None)
        return [] if first is None else list(first[2])

    def rows(
        self, file: str, columns: Sequence[str], start: int = 0, stop: int | None = None
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
                    yield row_start, lines.position, _json_object(line, file, row_start)


FORMATS: dict[str, ListFormat] = {
    "parquet": ParquetList(),
    "csv": CsvList(),
    "jsonl": JsonlList(),
}


def list_files(path: str, suffixes: tuple[str, ...], setting: str = "source.path") -> list[str]:
    """Files at `path` (a file, a folder or a glob, at any fsspec URL), sorted.

    Raises SourceError when there is none, or the place cannot be looked at.
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
            raise SourceError(
                f"{setting}: {shown(path)}: no such file, or no {kinds} files in the folder"
            )
        is_local = "file" in fs.protocol
        return sorted(found if is_local else map(str, map(fs.unstrip_protocol, found)))


def check_absent(fs: AbstractFileSystem, path: str) -> None:
    """Raise what `isdir` and `exists` keep to themselves, unless it is that nothing is there."""
    with suppress(FileNotFoundError):
        fs.info(path)


def is_glob(path: str) -> bool:
    """Whether `path` is a pattern; in a web address a question mark begins the query."""
    signs = "*" if path.startswith(("http://", "https://")) else "*?["
    return any(sign in path for sign in signs)


def shown(place: str) -> str:
    """A path or URL without what may be a secret in it: a password, a signature."""
    if "://" not in place:
        return place
    parts = urlsplit(place)
    address = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, address, parts.path, "", ""))


def require_columns(wanted: dict[str, str], present: Sequence[str], file: str) -> None:
    """Raise SourceError, with the nearest name, unless every {setting: column} is present."""
    for setting, column in wanted.items():
        if column not in present:
            near = difflib.get_close_matches(column, present, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(present)}"
            raise SourceError(f"{setting}: {shown(file)} has no column {column!r} ({hint})")


def join_spans(spans: Iterable[Span]) -> list[Span]:
    """The same rows in as few spans as their order allows."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].file == span.file and joined[-1].stop == span.start:
            span = Span(span.file, joined.pop().start, span.stop)
        joined.append(span)
    return joined


@contextmanager
def reading(place: str) -> Iterator[None]:
    """Turn what goes wrong in reading `place` into one clear line."""
    from pyarrow import ArrowException

    try:
        yield
    except SourceError:
        raise
    except FileNotFoundError:
        raise SourceError(f"source: {shown(place)}: no such file or folder") from None
    except (OSError, ValueError, ImportError, csv.Error, ArrowException) as error:
        raise SourceError(
            f"source: {shown(place)}: cannot be read: {_reason(error, place)}"
        ) from None
    except Exception as error:
        if not is_of_client(error):
            raise
        raise SourceError(
            f"source: {shown(place)}: cannot be reached: {_reason(error, place)}"
        ) from None


def _reason(error: Exception, place: str) -> str:
    words = " ".join(str(error).split()).replace(place, shown(place))[:300]
    return words or type(error).__name__


class _Lines:
    """Lines of a binary stream as text, counting the bytes given out."""

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
        # A byte order mark is no part of the first column's name.
        text = line.removeprefix(b"\xef\xbb\xbf") if self.position == 0 else line
        self.position += len(line)
        return text.decode(errors="replace")


def _open_text(file: str) -> Any:
    return fsspec.open(file, "rb", compression="infer")


def _json_object(line: str, file: str, position: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise SourceError(f"source: {shown(file)}: the line at byte {position} is no JSON object")
    return value


def _row_groups(metadata: Any, start: int, stop: int) -> tuple[list[int], int]:
    """Numbers of the row groups that hold rows [start, stop), and the first's first row."""
    groups: list[int] = []
    first_row, position = start, 0
    for number in range(metadata.num_row_groups):
        following = position + metadata.row_group(number).num_rows
        if position < stop and following > start:
            first_row = position if not groups else first_row
            groups.append(number)
        position = following
    return groups, first_row
