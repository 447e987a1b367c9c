"""Sources of rows: URL lists, picture folders, datasets of parquet files, tars, the demo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs

from artifacts.download_or_find_model import cache_folder
from artifacts.hashing import digest_bytes, digest_json
from configs.settings.source import DatasetSource, DigitsSource, FolderSource, UrlSource
from tasks.beam_workers import is_hub_id
from tasks.download.list_files import (
    ListedFile,
    check_absent,
    is_glob,
    list_files,
    open_file,
    reading,
    require_columns,
)
from tasks.download.read_lists_by_duckdb import (
    FORMATS,
    hash_rows,
    read_list,
    read_malformed_list,
)
from tasks.download.read_malformed_lists import json_rows
from tasks.download.row_fields_and_hash import (
    additional_of,
    captions_of,
    score_of,
    text_of,
    text_of_file,
)
from tasks.download.serve_folder import check_port, serve_folder
from tasks.download.shard_boundaries import shard_ends
from tasks.download.source_protocol import (
    PictureLocation,
    Piece,
    ServedAt,
    Source,
    embedded_row,
    identity,
    named_columns,
)
from tasks.download.stage_errors import SourceError
from tasks.download.tars import Tars

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
FOLDER_PIECE = 1000  # files: the average of a piece of a folder
PICTURES_AT_ONCE = 32  # in memory, of a parquet file


class UrlList:
    """Lists of image URLs."""

    def __init__(self, settings: UrlSource) -> None:
        self.settings = settings
        self.format = FORMATS[settings.format]

    def check(self) -> None:
        file = self._files()[0].name
        require_columns(named_columns(self.settings), self.format.columns(file), file)

    def pieces(self) -> Iterator[Piece]:
        s = self.settings
        columns = {
            "url": s.url_column,
            "captions": s.caption_column,
            "sha256": s.sha256_column,
            "aesthetic_score": s.aesthetic_column,
        }
        for file in self._files():
            given = (file.name, self.format, columns, s.base_url, s.additional_columns)
            yield Piece(
                identity(s, [file]),
                partial(read_list, *given),
                partial(read_malformed_list, *given),
            )

    def pictures(self, places: Iterable[PictureLocation]) -> Iterator[bytes | None]:
        return iter(())

    def open(self) -> AbstractContextManager[ServedAt]:
        return nullcontext(ServedAt(self.settings.base_url))

    def _files(self) -> list[ListedFile]:
        return list_files(self.settings.path, self.format.suffixes)


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
        ends = [*shard_ends(np.array(prefixes, np.uint32), FOLDER_PIECE), len(stems)]
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
            if not fs.isdir(root):
                check_absent(fs, root)
                raise SourceError(f"source.path: {self.settings.path}: no such folder")
            name = f"{root.rstrip('/')}/{self.METADATA}"
            if not fs.exists(name):
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


def _ascending(places: Iterable[PictureLocation]) -> Iterator[tuple[str, list[int]]]:
    """(file, ascending numbers of rows): a file is read again for a number that goes back."""
    file, numbers = "", list[int]()
    for place in places:
        row = int(place.row or 0)
        if numbers and (place.file != file or row <= numbers[-1]):
            yield file, numbers
            numbers = []
        file = place.file
        numbers.append(row)
    if numbers:
        yield file, numbers


class Dataset:
    """Parquet files with embedded pictures: bytes, or Hugging Face's {bytes, path} structs."""

    def __init__(self, settings: DatasetSource) -> None:
        self.settings = settings

    def check(self) -> None:
        file = self._files()[0].name
        require_columns(named_columns(self.settings), FORMATS["parquet"].columns(file), file)

    def pieces(self) -> Iterator[Piece]:
        for file in self._files():
            yield Piece(identity(self.settings, [file]), partial(self._rows, file.name))

    def pictures(self, places: Iterable[PictureLocation]) -> Iterator[bytes | None]:
        for file, wanted in _ascending(places):
            image = self.settings.image_column
            selected = set(wanted)
            for number, values in _parquet_rows(file, [image], wanted[0], wanted[-1] + 1):
                if number in selected:
                    yield self._picture(values[image])

    def open(self) -> AbstractContextManager[ServedAt]:
        return nullcontext(ServedAt())

    def _rows(self, file: str) -> Iterator[pa.Table]:
        s = self.settings

        def rows() -> Iterator[dict[str, Any]]:
            for number, values in _parquet_rows(file, list(named_columns(s).values())):
                captions = captions_of(values[s.caption_column])
                score = score_of(values.get(s.aesthetic_column or ""))
                picture = self._picture(values[s.image_column])
                more = additional_of(s.additional_columns, values)
                yield embedded_row(picture, PictureLocation(file, number), captions, score, more)

        return hash_rows(rows())

    def _files(self) -> list[ListedFile]:
        path, split = self.settings.path, self.settings.split
        if is_hub_id(path):
            revision = f"@{self.settings.revision}" if self.settings.revision else ""
            path = f"hf://datasets/{path}{revision}"
        found = list_files(path, FORMATS["parquet"].suffixes)
        if [file.name for file in found] == [path] or is_glob(path):
            return found
        # <split>-00000-of-00001.parquet, or <split>/0000.parquet in the hub's conversions
        folder = url_to_fs(path)[1].rstrip("/")
        chosen = [f for f in found if _is_of_split(f.name, folder, split)]
        if not chosen and folder.rpartition("/")[2] == split:
            return found
        if not chosen:
            names = ", ".join(f.name.rpartition("/")[2] for f in found[:5])
            raise SourceError(f"source.split: {path} has no files of split {split!r} ({names})")
        return chosen

    def _picture(self, image: Any) -> bytes | None:
        picture = image.get("bytes") if isinstance(image, dict) else image
        if not isinstance(picture, bytes | None):
            raise SourceError(
                f"source.image_column: {self.settings.image_column} holds "
                f"{type(picture).__name__}, not encoded pictures (bytes, or a struct with bytes)"
            )
        return picture


class Digits:
    """The demo's digits: rendered into the cache, served on loopback and read as a URL list."""

    def __init__(self, settings: DigitsSource) -> None:
        self.settings = settings
        name = f"digits-{settings.seed}-{settings.count}-{settings.rehearsal}"
        self.folder = cache_folder() / "demo" / name
        path = str(self.folder / "urls.parquet")
        listed = {"kind": "urls", "path": path, "sha256_column": "sha256"}
        self.list = UrlList(UrlSource.model_validate(listed))

    def check(self) -> None:
        check_port(self.settings.port)

    def pieces(self) -> Iterator[Piece]:
        yield Piece(
            digest_json(self.settings.model_dump(mode="json", exclude={"port"})), self._rows
        )

    def pictures(self, places: Iterable[PictureLocation]) -> Iterator[bytes | None]:
        return self.list.pictures(places)

    def open(self) -> AbstractContextManager[ServedAt]:
        self._draw()
        return serve_folder(self.folder, self.settings.port, ServedAt)

    def _rows(self) -> Iterator[pa.Table]:
        self._draw()
        for piece in self.list.pieces():
            yield from piece.read()

    def _draw(self) -> None:
        from demo import dataset

        try:
            settings = self.settings
            dataset.write(
                self.folder,
                seed=settings.seed,
                count=settings.count,
                rehearsal=settings.rehearsal,
            )
        except OSError as error:
            raise SourceError(
                f"source: the demo's pictures cannot be written to {self.folder} "
                f"({error.strerror or error}): set KILN_CACHE to a writable folder"
            ) from error


SOURCES: dict[str, Callable[[Any], Source]] = {
    "urls": UrlList,
    "folder": Folder,
    "dataset": Dataset,
    "tars": Tars,
    "digits": Digits,
}


def _stem(name: str) -> str:
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.rpartition(".")[0]


def _is_of_split(name: str, folder: str, split: str) -> bool:
    """Whether a file is of a split, by its name below the dataset's folder."""
    below = name.partition(f"{folder}/")[2] or name
    return any(part.startswith(split) for part in below.split("/")[-2:])


def _parquet_rows(
    file: str, columns: list[str], start: int = 0, stop: int | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, values) of the rows in [start, stop), of which few are in memory at a time."""
    with reading(file), open_file(file) as stream:
        table = pq.ParquetFile(stream, buffer_size=2**20, pre_buffer=False)
        counts = [table.metadata.row_group(n).num_rows for n in range(table.num_row_groups)]
        ends = np.cumsum(counts, dtype=int)
        stop = int(sum(counts)) if stop is None else stop
        groups = [n for n, end in enumerate(ends) if end > start and end - counts[n] < stop]
        number = int(ends[groups[0]]) - counts[groups[0]] if groups else 0
        for batch in table.iter_batches(PICTURES_AT_ONCE, row_groups=groups, columns=columns):
            for values in batch.to_pylist() if number < stop else []:
                if start <= number < stop:
                    yield number, values
                number += 1


def _bytes_at(file: str) -> bytes | None:
    with reading(file):
        try:
            with open_file(file) as stream:
                return bytes(stream.read())
        except (FileNotFoundError, IsADirectoryError):
            return None
