"""A folder of pictures as a source."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from fsspec.core import url_to_fs

from artifacts.records import digest_bytes
from configs.secrets import without_secrets
from configs.settings.data import FolderSource
from tasks.download.list_files import (
    ListedFile,
    is_absent,
    is_folder,
    is_hidden,
    list_files,
    open_file,
    reading,
    require_columns,
)
from tasks.download.parquet_dataset import parquet_rows
from tasks.download.read_lists_by_duckdb import FORMATS, hash_rows
from tasks.download.read_malformed_lists import csv_rows, json_rows
from tasks.download.row_fields_and_hash import (
    additional_of,
    captions_of,
    score_of,
    text_of,
    text_of_file,
)
from tasks.download.shard_boundaries import shard_ends
from tasks.download.source_protocol import (
    PictureLocation,
    Piece,
    ServedAt,
    embedded_row,
    identity,
    named_columns,
)
from tasks.download.stage_errors import SourceError
from tasks.download.tars import EXTENSIONS

PICTURES = tuple(f".{extension}" for extension in EXTENSIONS)
PIECE = 1000  # files: the average of a piece
CAPTION = ".txt"
#: Names of tables of pictures, as of `datasets`, -> their format; of two beside each other, the
#: first is read.
METADATA = {"metadata.jsonl": "jsonl", "metadata.csv": "csv", "metadata.parquet": "parquet"}
#: Unread files that a warning names.
NAMED = 5
log = logging.getLogger("kiln")


class FolderFiles(NamedTuple):
    """The files of a folder of pictures."""

    tables: dict[str, list[ListedFile]]  # metadata -> all files of its folder
    captioned: list[ListedFile]  # the others, whose captions are beside them

    @property
    def unread(self) -> list[str]:
        """Names of files that look like captions or metadata and are neither."""
        files = [file.name for part in (*self.tables.values(), self.captioned) for file in part]
        pictures = {name for name in files if _has(name, *PICTURES)}
        stems = set(map(_stem, pictures))
        texts = (file.name for file in self.captioned if _has(file.name, CAPTION))
        read = pictures | self.tables.keys() | {text for text in texts if _stem(text) in stems}
        others = ((name, _stem(name)) for name in files if name not in read)
        return [n for n, s in others if s in stems or s in pictures or _own_name(s) == "metadata"]


class Folder:
    """A folder of pictures: one row per line of a table of METADATA, or else per picture.

    A table is of its folder and all below it. Elsewhere the caption of `name.jpg` is the text of
    `name.txt`.
    """

    def __init__(self, settings: FolderSource) -> None:
        self.settings = settings
        self.columns = {"source.path": "file_name", **named_columns(settings)}

    def check(self) -> None:
        files, folder = self._files(), self.settings.path
        if files.tables:
            table = next(iter(files.tables))
            columns = FORMATS[METADATA[_own_name(table)]].columns(table)
            require_columns(self.columns, columns, table)
        elif self.settings.aesthetic_column or self.settings.additional_columns:
            scores = self.settings.aesthetic_column is not None
            setting = "aesthetic_column" if scores else "additional_columns"
            raise SourceError(f"source.{setting}: {folder} has no {', '.join(METADATA)}")
        elif not any(_has(file.name, *PICTURES) for file in files.captioned):
            raise SourceError(f"source.path: {folder} has no pictures ({', '.join(PICTURES)})")
        if unread := files.unread:
            names = ", ".join(map(without_secrets, unread[:NAMED]))
            log.warning(
                "source: %s: %s files beside pictures are not read (%s): captions are read from "
                "%s, or without them from one <name>%s for each picture",
                *(without_secrets(folder), f"{len(unread):,}", names),
                *(", ".join(METADATA), CAPTION),
            )

    def pieces(self) -> Iterator[Piece]:
        files = self._files()
        for table, beside in files.tables.items():
            yield Piece(identity(self.settings, beside), partial(self._listed, table))
        # A picture and its text have one stem; a piece has all files of its stems.
        stems = [list(part) for _, part in groupby(files.captioned, lambda file: _stem(file.name))]
        prefixes = [int(digest_bytes(_stem(part[0].name).encode())[:8], 16) for part in stems]
        ends = [*shard_ends(np.array(prefixes, np.uint32), PIECE), len(stems)]
        for start, end in zip([0, *ends], ends, strict=False):
            part = [file for files_of_stem in stems[start:end] for file in files_of_stem]
            # A web server may have captions that it does not list.
            texts = {_stem(f.name): f.name for f in part if _has(f.name, CAPTION)}
            pictures = [file.name for file in part if _has(file.name, *PICTURES)]
            captions = {name: texts.get(_stem(name), _stem(name) + CAPTION) for name in pictures}
            if captions:
                yield Piece(identity(self.settings, part), partial(self._captioned, captions))

    def pictures(self, places: Iterable[PictureLocation]) -> Iterator[bytes | None]:
        return (_bytes_at(place.file) for place in places)

    def open(self) -> AbstractContextManager[ServedAt]:
        return nullcontext(ServedAt())

    def _files(self) -> FolderFiles:
        with reading(self.settings.path):
            fs, root = url_to_fs(self.settings.path)
            if not is_folder(fs, root):
                raise SourceError(f"source.path: {self.settings.path}: no such folder")
        files = sorted(list_files(self.settings.path, ("",)), key=lambda file: _stem(file.name))
        found = FolderFiles(_tables(file.name for file in files), [])
        folders = {_folder(table): table for table in found.tables}
        for file in files:
            table = next((folders[above] for above in _above(file.name) if above in folders), None)
            (found.captioned if table is None else found.tables[table]).append(file)
        return found

    def _captioned(self, captions: Mapping[str, str]) -> Iterator[pa.Table]:
        def rows() -> Iterator[dict[str, Any]]:
            for file, text in captions.items():
                caption = text_of_file(_bytes_at(text) or b"").strip()
                yield embedded_row(_bytes_at(file), PictureLocation(file, None), (caption,), None)

        return hash_rows(rows())

    def _listed(self, metadata: str) -> Iterator[pa.Table]:
        def rows() -> Iterator[dict[str, Any]]:
            hidden = 0
            for values in _rows(metadata, [*self.columns.values()]):
                name = text_of(values.get("file_name"))
                if is_hidden(name):
                    hidden += 1
                    continue
                if name.startswith("/") or ".." in name.split("/") or "://" in name:
                    raise SourceError(
                        f"source: {metadata}: file_name {name!r} leads out of the folder"
                    )
                file = f"{_folder(metadata)}/{name}"
                picture = _bytes_at(file) if name else None
                captions = captions_of(values.get(self.settings.caption_column))
                score = score_of(values.get(self.settings.aesthetic_column or ""))
                more = additional_of(self.settings.additional_columns, values)
                yield embedded_row(picture, PictureLocation(file, None), captions, score, more)
            if hidden:
                words = "source: %s: %d lines name hidden files, which are no rows"
                log.warning(words, without_secrets(metadata), hidden)

        with reading(metadata):
            yield from hash_rows(rows())


def _tables(names: Iterable[str]) -> dict[str, list[ListedFile]]:
    """The tables among the files, without those in a folder that one above them is of."""
    order = [*METADATA]
    tables = [name for name in names if _own_name(name) in METADATA]
    tables.sort(key=lambda name: (name.count("/"), _folder(name), order.index(_own_name(name))))
    folders = dict[str, str]()
    for name in tables:
        if not any(above in folders for above in _above(name)):
            folders[_folder(name)] = name
    return {name: [] for name in folders.values()}


def _rows(table: str, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    kind = METADATA[_own_name(table)]
    if kind == "parquet":
        return (values for _, values in parquet_rows(table, columns))
    return csv_rows(table, ",") if kind == "csv" else json_rows(table)


def _above(name: str) -> Iterator[str]:
    """The folders that a file is in."""
    while name := _folder(name):
        yield name


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _own_name(name: str) -> str:
    return name.rpartition("/")[2].lower()


def _has(name: str, *suffixes: str) -> bool:
    return name.lower().endswith(suffixes)


def _stem(name: str) -> str:
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.rpartition(".")[0]


def _bytes_at(file: str) -> bytes | None:
    with reading(file):
        try:
            with open_file(file) as stream:
                return bytes(stream.read())
        except IsADirectoryError:
            return None
        except FileNotFoundError as error:
            if not is_absent(file, error):
                raise
            return None
