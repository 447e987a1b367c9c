"""Rows of a source: URL lists, metadata.jsonl, captions beside pictures, embedded pictures."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fuzz.mutations import VALUES, encode, mutate, mutate_tree
from fuzz.reader import Reader

from artifacts.records import digest_bytes
from configs.errors import Refused
from configs.settings.data import DatasetSource, FolderSource, TarsSource, UrlSource
from tasks.download.folders import Dataset, Folder
from tasks.download.lists import MalformedList, PictureLocation, Source
from tasks.download.sources import UrlList
from tasks.download.tars import Tars

ROWS: list[dict[str, Any]] = [
    {"url": "http://h/1.jpg?sig=a", "caption": "a cat", "score": 5.5},
    {"url": "http://h/2.jpg", "caption": 'two\nlines, "quoted"', "score": 6},
    {"url": "http://h/3.jpg", "caption": "ein Bär", "score": None},
    {"url": "http://h/4.jpg", "caption": "", "score": 1},
]
SECRET = b"a file beside the folder"


def readers(folder: Path) -> list[Reader]:
    return [
        _urls(folder, "csv", "csv", _csv()),
        _urls(folder, "csv", "csv.gz", gzip.compress(_csv())),
        _urls(folder, "json", "json", json.dumps(ROWS).encode()),
        _urls(folder, "jsonl", "jsonl", _jsonl()),
        _urls(folder, "parquet", "parquet", _parquet(ROWS)),
        _dataset(folder),
        *(_tars(folder, kind) for kind in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)),
        *_folders(folder / "pictures"),
    ]


def _csv() -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(ROWS[0]))
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue().encode()


def _jsonl() -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=2)
    return sink.getvalue()


def _urls(folder: Path, kind: Any, suffix: str, valid: bytes) -> Reader:
    path = folder / f"list.{suffix}"
    settings = {"kind": "urls", "path": str(path), "format": kind, "aesthetic_column": "score"}
    source = UrlList(UrlSource.model_validate(settings))

    def read(rng: Random) -> bool:
        path.write_bytes(_changed(valid, kind, suffix, rng))
        return _is_right(source, folder, rng)

    return Reader(f"list.{suffix}", 6, read)


def _changed(valid: bytes, kind: str, suffix: str, rng: Random) -> bytes:
    if kind == "jsonl" and rng.randrange(2):
        rows = [encode(mutate_tree(row, rng), rng) for row in ROWS]
        return b"\n".join(rows)
    if suffix.endswith(".gz") and rng.randrange(2):
        return gzip.compress(mutate(gzip.decompress(valid), rng), compresslevel=1)
    if kind == "parquet" and rng.randrange(4) == 0:
        try:
            return _parquet(mutate_tree(ROWS, rng))
        except (pa.ArrowException, ValueError, TypeError, AttributeError, OverflowError):
            return valid  # parquet cannot say it
    return mutate(valid, rng)


def _dataset(folder: Path) -> Reader:
    path = folder / "dataset.parquet"
    rows = [{"image": {"bytes": b"p%d" % n, "path": None}, "text": "a"} for n in range(4)]
    source = Dataset(DatasetSource(kind="dataset", path=str(path)))
    valid = _parquet(rows)

    def read(rng: Random) -> bool:
        data = valid
        if rng.randrange(3):
            data = mutate(valid, rng)
        else:
            try:
                data = _parquet(mutate_tree([{"image": "a", "text": "b"}] * 2, rng))
            except (pa.ArrowException, ValueError, TypeError, AttributeError, OverflowError):
                return False
        path.write_bytes(data)
        return _is_right(source, folder, rng)

    return Reader("dataset.parquet", 5, read)


def _tars(folder: Path, kind: int) -> Reader:
    path = folder / f"{kind}.tar"
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=kind) as tar:
        for n in range(3):
            # One edit makes none of these texts that of another sample.
            parts = {"jpg": b"p%d" % n * 5, "txt": b"a%d" % n * 5, "json": b'{"score": 1}'}
            for extension, data in parts.items():
                member = tarfile.TarInfo(f"{'long' * 30 * n}{n}.{extension}")
                member.size, member.mtime = len(data), n + 0.5
                tar.addfile(member, io.BytesIO(data))
    settings = {"kind": "tars", "path": str(path), "aesthetic_column": "score"}
    source, valid = Tars(TarsSource.model_validate(settings)), sink.getvalue()
    captions = {digest_bytes(b"p%d" % n * 5): f"a{n}" * 5 for n in range(3)}

    def read(rng: Random) -> bool:
        path.write_bytes(mutate(valid, rng))
        return _is_right(source, folder, rng, captions)

    return Reader(f"{kind}.tar", 6, read)


def _folders(folder: Path) -> list[Reader]:
    listed, plain = folder / "listed", folder / "plain"
    for place in (listed, plain):
        place.mkdir(parents=True)
        (place / "1.jpg").write_bytes(b"picture one")
        (place / "2.jpg").write_bytes(b"picture two")
    (folder / "secret.jpg").write_bytes(SECRET)
    metadata = listed / "metadata.jsonl"
    rows = [{"file_name": f"{n}.jpg", "text": "a"} for n in (1, 2)]

    def read_listed(rng: Random) -> bool:
        lines = [encode(mutate_tree(row, rng), rng) for row in rows]
        if rng.randrange(4) == 0:
            name = rng.choice([*NAMES, f"x::{folder}/secret.jpg"])
            lines.append(json.dumps({"file_name": name, "text": "b"}).encode())
        data = b"\n".join(lines)
        metadata.write_bytes(mutate(data, rng) if rng.randrange(2) else data)
        return _is_right(Folder(FolderSource(kind="folder", path=str(listed))), folder, rng)

    def read_captions(rng: Random) -> bool:
        (plain / "1.txt").write_bytes(mutate("ein Bär, a bear\n".encode(), rng))
        return _is_right(Folder(FolderSource(kind="folder", path=str(plain))), folder, rng)

    return [Reader("metadata.jsonl", 6, read_listed), Reader("captions", 2, read_captions)]


#: Names of files that lead elsewhere, or that a filesystem reads in its own way.
NAMES: list[Any] = [
    *("../secret.jpg", "/etc/passwd", "./../secret.jpg", "a/../../secret.jpg", "..", ".", "", "/"),
    *("1.jpg::file", "zip::1.jpg", "x::file:secret.jpg", "1.jpg\0", "*", "[12].jpg", "1.jpg/"),
    *("file:../secret.jpg", "file:secret.jpg", "simplecache::1.jpg", "~", "x" * 300, "%2e%2e"),
    *VALUES[:20],
]


def _is_right(
    source: Source, folder: Path, rng: Random, captions: Mapping[str, str] = MappingProxyType({})
) -> bool:
    """Two readings find the same rows, which are text that can be stored, and their pictures.

    No picture of `captions`, by its sha256, has the caption of another one.
    """
    try:
        source.check()
        scanned, again = _rows(source), _rows(source)
        embedded = [row for row in scanned if row["file"] is not None]
        chosen = sorted(rng.sample(range(len(embedded)), min(3, len(embedded))))
        wanted = [embedded[number] for number in chosen]
        pictures = list(source.pictures(PictureLocation(row["file"], row["row"]) for row in wanted))
    except Refused as error:
        assert "\n" not in str(error), "not one line"
        return False
    assert scanned == again
    assert [digest_bytes(picture or b"") for picture in pictures] == [r["sha256"] for r in wanted]
    for row in scanned:
        _check_row(row)
        others = {text for sha256, text in captions.items() if sha256 != row["sha256"]}
        assert row["sha256"] not in captions or row["captions"][0] not in others
    return True


def _rows(source: Source) -> list[dict[str, Any]]:
    found = []
    for piece in source.pieces():
        try:
            tables = list(piece.read())
        except MalformedList:
            tables = list(piece.read_malformed())
        found += [row for table in tables for row in table.to_pylist()]
    return found


def _check_row(row: dict[str, Any]) -> None:
    "\n".join((row["url"], *row["captions"])).encode()
    assert row["captions"]
    assert row["sha256"] != digest_bytes(SECRET), "a file outside of the folder was read"
