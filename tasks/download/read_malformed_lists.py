"""Read csv, jsonl and txt lists line by line in Python, malformed lines included.

DuckDB is many times faster, but it refuses a file with a malformed line, or drops the line.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import fsspec

from tasks.download.row_fields_and_hash import integer

#: Bytes of a line in memory, as of DuckDB's largest JSON object: a packed file may have one line.
MAX_LINE = 2**24
BUFFER = 2**16  # bytes
#: Characters around a URL in a text file.
BLANK = " \t\r\n\v\f"


def csv_header(file: str, delimiter: str) -> list[str]:
    """Names of the columns: the fields of the first line."""
    with _open_text(file) as stream:
        return next(csv.reader(_lines(stream), delimiter=delimiter), [])


def csv_rows(file: str, delimiter: str) -> Iterator[dict[str, Any]]:
    """The fields of each row by column; none of a malformed row."""
    with _open_text(file) as stream:
        lines = _lines(stream)
        header = next(csv.reader(lines, delimiter=delimiter), [])
        for values in _fields(lines, delimiter):
            if values:
                yield dict(zip(header, values, strict=False))


def json_rows(file: str) -> Iterator[dict[str, Any]]:
    """The JSON object of each line; an empty one for a malformed line."""
    with _open_text(file) as stream:
        yield from (_json_object(line) for line in _lines(stream) if line.strip())


def text_rows(file: str) -> Iterator[dict[str, Any]]:
    """The URL of each line that is not blank; an empty one for a line that is too long."""
    with _open_text(file) as stream:
        for line in _lines(stream):
            if url := line.strip(BLANK):
                yield {"url": url if len(line) < MAX_LINE else ""}


@contextmanager
def _open_text(file: str) -> Iterator[IO[bytes]]:
    """The unpacked bytes of a file, which is buffered: files of buckets have no readline(size)."""
    opened: Any = fsspec.open(file, "rb", compression="infer")
    with opened as stream, io.BufferedReader(stream, BUFFER) as buffered:
        yield buffered


def _lines(stream: IO[bytes]) -> Iterator[str]:
    """The lines of UTF-8 text, without the byte order mark; of a longer one the first MAX_LINE."""
    mark, is_start = b"\xef\xbb\xbf", True
    while line := stream.readline(MAX_LINE):
        if is_start:
            yield line.removeprefix(mark).decode(errors="replace")
        mark, is_start = b"", line.endswith(b"\n")


def _fields(lines: Iterable[str], delimiter: str) -> Iterator[list[str]]:
    """Fields of each row; one empty field if the row is malformed."""
    reader = csv.reader(lines, delimiter=delimiter)
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
        value = json.loads(line, parse_int=integer)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
