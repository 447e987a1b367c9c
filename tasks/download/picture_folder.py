"""A folder of pictures as a source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
from fsspec.core import url_to_fs

from artifacts.hashing import digest_bytes
from configs.settings.source import FolderSource
from tasks.download.list_files import (
    find_info,
    is_absent,
    is_folder,
    list_files,
    open_file,
    reading,
    require_columns,
)
from tasks.download.read_lists_by_duckdb import FORMATS, hash_rows
from tasks.download.read_malformed_lists import json_rows
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


class Folder:
    """A folder of pictures: one row per picture, or per line of metadata.jsonl if present.

    Without metadata.jsonl, the caption of `name.jpg` is the text of `name.txt`.
    """

    METADATA = "metadata.jsonl"

    def __init__(self, settings: FolderSource) -> None:
        self.settings = settings
        self.columns = {"source.path": "file_name", **named_columns(settings)}

    def check(self) -> None:
        metadata = self._metadata()
        if metadata is not None:
            columns = FORMATS["jsonl"].columns(metadata)
            require_columns(self.columns, columns, metadata)
        elif self.settings.aesthetic_column or self.settings.additional_columns:
            scores = self.settings.aesthetic_column is not None
            setting = "aesthetic_column" if scores else "additional_columns"
            folder = self.settings.path
            raise SourceError(f"source.{setting}: {folder} has no {self.METADATA}")
        else:
            list_files(self.settings.path, PICTURES)

    def pieces(self) -> Iterator[Piece]:
        metadata = self._metadata()
        files = sorted(list_files(self.settings.path, ("",)), key=lambda file: _stem(file.name))
        if metadata is not None:
            yield Piece(identity(self.settings, files), partial(self._listed, metadata))
            return
        # A picture and its text have one stem; a piece has all files of its stems.
        stems = [list(found) for _, found in groupby(files, lambda file: _stem(file.name))]
        prefixes = [int(digest_bytes(_stem(found[0].name).encode())[:8], 16) for found in stems]
        ends = [*shard_ends(np.array(prefixes, np.uint32), PIECE), len(stems)]
        for start, end in zip([0, *ends], ends, strict=False):
            part = [file for found in stems[start:end] for file in found]
            names = [file.name for file in part if file.name.lower().endswith(PICTURES)]
            if names:
                yield Piece(identity(self.settings, part), partial(self._captioned, names))

    def pictures(self, places: Iterable[PictureLocation]) -> Iterator[bytes | None]:
        return (_bytes_at(place.file) for place in places)

    def open(self) -> AbstractContextManager[ServedAt]:
        return nullcontext(ServedAt())

    def _metadata(self) -> str | None:
        with reading(self.settings.path):
            fs, root = url_to_fs(self.settings.path)
            if not is_folder(fs, root):
                raise SourceError(f"source.path: {self.settings.path}: no such folder")
            name = f"{root.rstrip('/')}/{self.METADATA}"
            if find_info(fs, name) is None:
                return None
            return name if "file" in fs.protocol else str(fs.unstrip_protocol(name))

    def _captioned(self, files: list[str]) -> Iterator[pa.Table]:
        def rows() -> Iterator[dict[str, Any]]:
            for file in files:
                text = _bytes_at(f"{file.rpartition('.')[0]}.txt") or b""
                caption = text_of_file(text).strip()
                yield embedded_row(_bytes_at(file), PictureLocation(file, None), (caption,), None)

        return hash_rows(rows())

    def _listed(self, metadata: str) -> Iterator[pa.Table]:
        def rows() -> Iterator[dict[str, Any]]:
            for values in json_rows(metadata):
                name = text_of(values.get("file_name"))
                if name.startswith("/") or ".." in name.split("/") or "://" in name:
                    raise SourceError(
                        f"source: {metadata}: file_name {name!r} leads out of the folder"
                    )
                file = f"{metadata.rpartition('/')[0]}/{name}"
                picture = _bytes_at(file) if name else None
                captions = captions_of(values.get(self.settings.caption_column))
                score = score_of(values.get(self.settings.aesthetic_column or ""))
                more = additional_of(self.settings.additional_columns, values)
                yield embedded_row(picture, PictureLocation(file, None), captions, score, more)

        with reading(metadata):
            yield from hash_rows(rows())


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
