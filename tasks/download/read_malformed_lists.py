"""Read csv, jsonl and txt lists line by line in Python, malformed lines included.

DuckDB is many times faster, but it refuses a file with a malformed line, or drops the line.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import IO, Any

from tasks.download.list_files import open_file
from tasks.download.row_fields_and_hash import integer, text_of
from tasks.download.stage_errors import SourceError

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
    """The JSON object of each line; an empty one for a malformed line."""
    with _open_text(file) as stream:
        yield from (_json_object(line) for line in _lines(stream) if line.strip())


def json_lines(file: str) -> Iterator[dict[str, str]]:
    """The text of each line, of which DuckDB finds the malformed ones.

    DuckDB refuses unpaired surrogates, which are replaced.
    """
    with _open_text(file) as stream:
        for line in _lines(stream):
            if line.strip():
                if SURROGATE.search(line):
                    line = text_of(json.dumps(_json_object(line), ensure_ascii=False))
                yield {"json": line}


def text_rows(file: str) -> Iterator[dict[str, str]]:
    """The URL of each line that is not blank; an empty one for a line that is too long."""
    with _open_text(file) as stream:
        for line in _lines(stream):
            if url := line.strip(BLANK):
                yield {"url": url if len(line) < MAX_LINE else ""}


def first_byte(file: str) -> bytes:
    """The first byte that is no blank."""
    with _open_text(file) as stream:
        return stream.read(BUFFER).removeprefix(codecs.BOM_UTF8).lstrip()[:1]


@contextmanager
def _open_text(file: str) -> Iterator[IO[bytes]]:
    """The unpacked bytes of a file, which is buffered: files of buckets have no readline(size).

    Raises:
        SourceError: it is UTF-16, as spreadsheets write text.
    """
    with open_file(file, "infer") as stream, io.BufferedReader(stream, BUFFER) as buffered:
        if buffered.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise SourceError(f"source: {file}: it is UTF-16: save it as UTF-8")
        yield buffered


def _lines(stream: IO[bytes]) -> Iterator[str]:
    """The lines of UTF-8 text, without the byte order mark; of a longer one the first MAX_LINE."""
    mark, is_start = b"\xef\xbb\xbf", True
    while line := stream.readline(MAX_LINE):
        if is_start:
            yield line.removeprefix(mark).decode(errors="replace")
        mark, is_start = b"", line.endswith(b"\n")


def _fields(lines: Iterator[str], delimiter: str) -> Iterator[list[str]]:
    """Fields of each record; one empty field of a malformed line.

    A malformed line may have an open quote, which takes the lines behind it. These are read again,
    one by one: an open quote of theirs would take the same lines, and end like the first one. Each
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
            # The last line may begin a record of its own, since it ended the other one.
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
    quoted = rf'(^|{delimiter}) *("[^"]*+(?:""[^"]*+)*+") *(?={delimiter}|[\r\n]|$)'
    for text in (line, re.sub(quoted, r"\1\2", line)):
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
