"""Parquet files with embedded pictures as a source."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs

from configs.settings.data import DatasetSource
from tasks.beam_workers import is_hub_id
from tasks.download.list_files import (
    ListedFile,
    below,
    is_pattern,
    list_files,
    open_file,
    reading,
    require_columns,
)
from tasks.download.read_lists_by_duckdb import FORMATS, hash_rows, require_text
from tasks.download.row_fields_and_hash import additional_of, captions_of, score_of
from tasks.download.source_protocol import (
    PictureLocation,
    Piece,
    ServedAt,
    embedded_row,
    identity,
    named_columns,
)
from tasks.download.stage_errors import SourceError

PICTURES_AT_ONCE = 32  # in memory, of a parquet file
#: Behind a split's name in that of a file: its number among `of` files, or any number.
NUMBER = r"(-\d+-of-\d+(-[0-9a-f]+)?|([-_. ]?\d+)*)(?i:\.parquet)"


class Dataset:
    """Parquet files with embedded pictures: bytes, or Hugging Face's {bytes, path} structs."""

    def __init__(self, settings: DatasetSource) -> None:
        self.settings = settings

    def check(self) -> None:
        file = self._files()[0].name
        require_columns(named_columns(self.settings), FORMATS["parquet"].columns(file), file)
        require_text({"source.caption_column": self.settings.caption_column}, file)

    def pieces(self) -> Iterator[Piece]:
        for file in self._files():
            yield Piece(identity(self.settings, [file]), partial(self._rows, file.name))

    def pictures(self, places: Iterable[PictureLocation]) -> Iterator[bytes | None]:
        for file, wanted in _ascending(places):
            image = self.settings.image_column
            selected = set(wanted)
            for number, values in parquet_rows(file, [image], wanted[0], wanted[-1] + 1):
                if number in selected:
                    yield self._picture(values[image])

    def open(self) -> AbstractContextManager[ServedAt]:
        return nullcontext(ServedAt())

    def _rows(self, file: str) -> Iterator[pa.Table]:
        s = self.settings

        def rows() -> Iterator[dict[str, Any]]:
            for number, values in parquet_rows(file, list(named_columns(s).values())):
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
        fs, root = url_to_fs(path)
        if [file.name for file in found] == [path] or is_pattern(fs, root):
            return found
        chosen = [f for f in found if _is_of_split(below(f.name, root), split)]
        if not chosen and root.rstrip("/").rpartition("/")[2] == split:
            return found
        if not chosen:
            names = ", ".join(f.name.rpartition("/")[2] for f in found[:5])
            raise SourceError(
                f"source.split: {path} has no files of split {split!r} ({names}): write the whole "
                "name of a split, or a glob of its files as source.path"
            )
        return chosen

    def _picture(self, image: Any) -> bytes | None:
        picture = image.get("bytes") if isinstance(image, dict) else image
        if not isinstance(picture, bytes | None):
            raise SourceError(
                f"source.image_column: {self.settings.image_column} holds "
                f"{type(picture).__name__}, not encoded pictures (bytes, or a struct with bytes)"
            )
        return picture


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


def _is_of_split(name: str, split: str) -> bool:
    """Whether a file is of a split, by its name below the dataset's folder.

    As the hub writes them: <split>-00000-of-00001.parquet, or <split>/0000.parquet.
    """
    folder, _, file = name.rpartition("/")
    is_named = re.fullmatch(re.escape(split) + NUMBER, file) is not None
    return is_named or folder.rpartition("/")[2] == split


def parquet_rows(
    file: str, columns: Sequence[str], start: int = 0, stop: int | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, values) of the rows in [start, stop), of which few are in memory at a time."""
    with reading(file), open_file(file) as stream:
        table = pq.ParquetFile(stream, buffer_size=2**20, pre_buffer=False)
        counts = [table.metadata.row_group(n).num_rows for n in range(table.num_row_groups)]
        ends = np.cumsum(counts, dtype=int)
        stop = int(sum(counts)) if stop is None else stop
        groups = [n for n, end in enumerate(ends) if end > start and end - counts[n] < stop]
        number = int(ends[groups[0]]) - counts[groups[0]] if groups else 0
        for batch in table.iter_batches(PICTURES_AT_ONCE, row_groups=groups, columns=[*columns]):
            for values in batch.to_pylist() if number < stop else []:
                if start <= number < stop:
                    yield number, values
                number += 1
