"""Malformed lines of lists: each is a row without a picture, and costs no other row."""

import gzip
import json
import tracemalloc
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile
from source_rows import ROWS, make_recipe, many_rows, rows_of, write_list

from configs.settings.data import UrlSource
from tasks import download
from tasks.download import lists, shard_plan
from tasks.download.rows import Row

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("jsonl", "not json"),
        ("jsonl", "[1, 2]"),
        ("jsonl", '{"url": "http://example.org/9.jpg", "caption": "cut o'),
        ("jsonl", '{"url": "http://example.org/9.jpg", "caption": "\\ud83d'),
        ("csv", "http://example.org/9.jpg,a carriage return\rin the caption"),
        ("csv", f"http://example.org/9.jpg,{'x' * 200_000}"),
        ("csv", 'http://example.org/9.jpg,"an unclosed quote'),
        ("tsv", 'http://example.org/9.jpg\t"an unclosed quote'),
        ("csv", 'http://example.org/9.jpg,"a quoted" word'),
        ("csv", "http://example.org/9.jpg,a comma, in the caption"),
        ("csv", "http://example.org/9.jpg"),
    ],
    ids=[
        *("no JSON", "no object", "cut off", "cut in an emoji", "carriage return", "huge field"),
        *("unclosed quote", "unclosed quote in tsv", "quoted word", "too many values"),
        "too few values",
    ],
)
def test_a_malformed_line_is_a_row_without_a_picture(tmp_path: Path, kind: str, line: str) -> None:
    good = Path(write_list(tmp_path / f"a.{kind}", ROWS)).read_text(encoding="utf-8")
    lines = good.splitlines(keepends=True)
    (tmp_path / f"a.{kind}").write_text("".join([*lines[:2], f"{line}\n", *lines[2:]]), newline="")
    source = {"kind": "urls", "path": str(tmp_path / f"a.{kind}"), "format": kind}
    found = rows_of(make_recipe(source), tmp_path)
    urls = [row["url"] for row in ROWS]
    position = 2 if kind == "jsonl" else 1
    assert [row.url for row in found] == [*urls[:position], "", *urls[position:]]


@pytest.mark.parametrize(
    "malformed", [{9}, {9, 1000}, {4990}], ids=["the limit", "a quote", "the end"]
)
def test_an_unclosed_quote_takes_no_other_line(tmp_path: Path, malformed: set[int]) -> None:
    """Its record ends at the limit of a record, at another such quote or at the end of the file."""
    urls = [f"http://x/{n}.jpg" for n in range(5000)]
    lines = [f"{url},a caption" for url in urls]
    for n in malformed:
        lines[n] = f'{urls[n]},"unclosed caption'
    (tmp_path / "a.csv").write_text("\n".join(["url,caption", *lines]) + "\n")
    source = {"kind": "urls", "path": str(tmp_path / "a.csv"), "format": "csv"}
    found = rows_of(make_recipe(source, shard_size=5000), tmp_path)
    empty, read = Row("", ("",)), [Row(url, ("a caption",)) for url in urls]
    assert found == [empty if n in malformed else row for n, row in enumerate(read)]


CSV = ['u,"two\nlines"', 'u,"a ""quoted"" word"', 'u,24"', 'u,a "b" c', "u,c,", 'u,"c" ']
#: JSON values that Python and DuckDB read, or write as text, in different ways.
VALUES = ["true", "1E30", "1e16", "1e-7", "1e400", "NaN", '["a", true, NaN]', '{"b": [1,]}', "null"]
JSON = [f'{{"url": {value}, "caption": {value}, "url": 2}}' for value in VALUES]


@pytest.mark.parametrize(
    ("kind", "header", "lines"),
    [("csv", "url,caption\n", CSV), ("jsonl", "", JSON)],
    ids=["csv", "jsonl"],
)
def test_rows_that_duckdb_accepts_are_rows_of_both_readers(
    tmp_path: Path, kind: str, header: str, lines: list[str]
) -> None:
    path = str(tmp_path / f"a.{kind}")
    Path(path).write_text(header + "\n".join([*lines, "", ""]))
    columns = {"sha256_column": "url", "aesthetic_column": "url"}
    source = UrlSource.model_validate({"kind": "urls", "path": path, "format": kind, **columns})
    by_both = []
    for read in (lists.read_list, lists.read_malformed_list):
        tables = list(read(path, source))
        by_both.append([row for table in tables for row in table.to_pylist()])
    assert by_both[0] == by_both[1] and len(by_both[0]) == len(lines)


@pytest.mark.extended
def test_records_of_many_lines_with_stray_quotes_are_read_in_bounded_memory(tmp_path: Path) -> None:
    """Quotes that close one field and open the next one could make one record of all lines."""
    lines = [f'http://x/{n}.jpg","c\n' for n in range(100_000)]
    (tmp_path / "a.csv").write_text("".join(["url,caption\n", *lines]))
    read = lists.FORMATS["csv"].tolerant
    assert read is not None
    tracemalloc.start()
    urls = [row["url"] for row in read(str(tmp_path / "a.csv"))]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert urls == [""] * len(lines) and peak < 2**23


def test_a_malformed_line_of_a_remote_list_is_a_row_without_a_picture(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in many_rows(30)]
    data = "\n".join([*lines, '{"url": "cut off']).encode()
    fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/a::b.jsonl", data)
    source = {"kind": "urls", "path": f"memory://{tmp_path.name}", "format": "jsonl"}
    found = rows_of(make_recipe(source), tmp_path)
    assert [row.url for row in found] == [*(row["url"] for row in many_rows(30)), ""]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_malformed_lists_are_read_from_files_without_a_line_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The files of buckets and of web servers read whole lines only."""
    file = write_list(tmp_path / f"a.{kind}", ROWS)

    class RemoteFile(AbstractBufferedFile):
        def _fetch_range(self, start: int, end: int) -> bytes:
            return Path(self.path).read_bytes()[start:end]

    monkeypatch.setattr(LocalFileSystem, "_open", lambda fs, path, *_, **__: RemoteFile(fs, path))
    listed = {"kind": "urls", "path": file, "format": kind, "caption_column": None}
    tables = list(lists.read_malformed_list(file, UrlSource.model_validate(listed)))
    found = [url for table in tables for url in table["url"].to_pylist()]
    assert found == [row["url"] for row in ROWS]


def test_a_late_malformed_line_loses_no_row_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DuckDB and Python differ in what a blank line is, so one of them reads the whole file."""
    monkeypatch.setattr(lists, "BATCH", 2048)
    urls = [f"http://example.org/{n}.jpg" for n in range(20_000)]
    lines = [*urls[:10], "\t", " \v ", *urls[10:]]
    (tmp_path / "a.txt").write_bytes("\n".join(lines).encode() + b"\nhttp://h/\xff.jpg\n")
    listed = {"kind": "urls", "path": str(tmp_path / "a.txt"), "format": "txt"}
    source = {**listed, "caption_column": None}
    shards = download.plan(make_recipe(source, shard_size=30_000)).shards
    tables = [shard_plan.read_spans(shard.spans, shard_plan.plan_key()) for shard in shards]
    read = [url for table in tables for url in table["url"].to_pylist()]
    assert read == [*urls, "http://h/\ufffd.jpg"]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "txt"])
def test_a_line_that_unpacks_to_gigabytes_is_one_row_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(lists, "MAX_LINE", 2**20)
    rows = {"csv": "url,caption\nhttp://h/1,a\n", "jsonl": '{"url": "http://h/1"}\n'}
    before = rows.get(kind, "http://h/1\n")
    with gzip.open(tmp_path / f"a.{kind}.gz", "wb", compresslevel=1) as stream:
        stream.write(before.encode())
        for _ in range(40):
            stream.write(b"x" * 2**20)
        stream.write(b"\n" + before.splitlines()[-1].encode() + b"\n")
    file = str(tmp_path / f"a.{kind}.gz")
    listed = {"kind": "urls", "path": file, "format": kind, "caption_column": None}
    tracemalloc.start()
    tables = list(lists.read_malformed_list(file, UrlSource.model_validate(listed)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    urls = [url for table in tables for url in table["url"].to_pylist()]
    assert urls == ["http://h/1", "", "http://h/1"] and peak < 2**24
