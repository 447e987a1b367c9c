"""WebDataset tars of others as a source."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import groupby, islice
from typing import IO, Any

import pyarrow as pa
from braceexpand import braceexpand

from configs.secrets import without_secrets
from configs.settings.data import TarsSource
from tasks.download.list_files import (
    ListedFile,
    list_files,
    list_range,
    open_file,
    reading,
    require_columns,
)
from tasks.download.read_lists_by_duckdb import hash_rows
from tasks.download.read_tars import File, Sample, content_at, samples
from tasks.download.row_fields_and_hash import (
    additional_of,
    captions_of,
    integer,
    score_of,
    text_of_file,
)
from tasks.download.source_protocol import (
    PictureLocation,
    Piece,
    ServedAt,
    embedded_row,
    identity,
    named_columns,
)
from tasks.download.stage_errors import SourceError

TAR = (".tar",)
EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")
#: Bytes of a picture, and of a caption or a json, that are read: a tar may claim any size.
MAX_PICTURE, MAX_TEXT = 2**27, 2**20
#: Tars of a range, and samples in which a check looks for the columns.
MOST_TARS, CHECKED = 1_000_000, 100
#: A range of numbers, or what nests and separates ranges.
BRACES = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}|[{},]")
log = logging.getLogger("kiln")


class Tars:
    """WebDataset tars: one row per sample, whose picture is found by its position in the tar."""

    def __init__(self, settings: TarsSource) -> None:
        self.settings = settings
        extension = (settings.image_extension or "").lower()
        self.pictures_are = (extension,) if extension else EXTENSIONS
        self.has_text = settings.caption_column == "txt"
        is_key = settings.caption_column is not None and not self.has_text
        self.needs_json = bool(is_key or settings.aesthetic_column or settings.additional_columns)
        self.columns = named_columns(settings)

    def check(self) -> None:
        file = self._files()[0].name
        with _opened(file) as stream:
            found = list(islice(samples(stream, self._limit_of_text), CHECKED))
        if not found:
            return
        extensions = {extension: None for sample in found for extension in sample.files}
        if extensions.keys().isdisjoint(self.pictures_are):
            raise SourceError(
                f"source.image_extension: {file} has no pictures ({', '.join(self.pictures_are)}), "
                f"but {', '.join(islice(extensions, 20))}"
            )
        if not any(len(self._pictures(sample)) == 1 for sample in found):
            kinds = ", ".join(kind for kind in extensions if kind in self.pictures_are)
            raise SourceError(
                f"source.image_extension: {file} has no sample with one picture: set it to one of "
                f"{kinds}"
            )
        keys = {key: None for sample in found for key in _json(sample) or ()}
        # `txt` is the caption's file for one setting, and a key of the json for all others.
        texts = ["txt"] * ("txt" in extensions) + [key for key in keys if key != "txt"]
        for setting, column in self.columns.items():
            present = texts if setting == "source.caption_column" else list(keys)
            require_columns({setting: column}, present, file)

    def pieces(self) -> Iterator[Piece]:
        for file in self._files():
            yield Piece(identity(self.settings, [file]), partial(self._rows, file.name))

    def pictures(self, places: Iterable[PictureLocation]) -> Iterator[bytes | None]:
        for file, found in groupby(places, lambda place: place.file):
            with _opened(file) as stream:
                for place in found:
                    yield content_at(stream, int(place.row or 0), MAX_PICTURE)

    def open(self) -> AbstractContextManager[ServedAt]:
        return nullcontext(ServedAt())

    def _paths(self) -> list[str]:
        """The path, or those of its range."""
        path = self.settings.path
        if "{" not in path:
            return [path]
        try:
            # braceexpand holds some ranges in memory as a whole.
            if _count(path) <= MOST_TARS:
                return list(braceexpand(path, escape=False))  # a backslash is part of a name
        except ValueError as error:
            raise SourceError(f"source.path: {path}: {error}") from None
        raise SourceError(f"source.path: {path}: it names more than {MOST_TARS:,} files")

    def _files(self) -> list[ListedFile]:
        """All tars, sorted by name, each once."""
        paths = self._paths()
        listed = list_files(paths[0], TAR) if len(paths) == 1 else list_range(paths, TAR)
        found = {file.name: file for file in listed}
        return [found[name] for name in sorted(found)]

    def _pictures(self, sample: Sample) -> list[File]:
        return [sample.files[name] for name in self.pictures_are if name in sample.files]

    def _rows(self, file: str) -> Iterator[pa.Table]:
        def rows() -> Iterator[dict[str, Any]]:
            missing, first = 0, ""
            for sample in samples(stream, self._limit):
                row = self._row(file, sample)
                if not row["url"]:
                    missing, first = missing + 1, first or sample.key
                yield row
            if missing:
                words = "source: %s: %d samples have no usable picture, the first is %r"
                log.warning(words, without_secrets(file), missing, first[:200])

        with _opened(file) as stream:
            yield from hash_rows(rows())

    def _row(self, file: str, sample: Sample) -> dict[str, Any]:
        """A row, without a picture if any file of the sample that it needs is unusable."""
        s, files = self.settings, sample.files
        values = _json(sample) if self.needs_json else {}
        given = files["txt"].content if self.has_text and "txt" in files else b""
        pictures = self._pictures(sample)
        picture = pictures[0] if len(pictures) == 1 else None
        is_usable = picture is not None and values is not None and given is not None
        values = values or {}
        captions: tuple[str, ...] = captions_of(values.get(s.caption_column or ""))
        if self.has_text:
            captions = (text_of_file(given or b"").strip(),)
        return embedded_row(
            picture.content if picture is not None and is_usable else None,
            PictureLocation(file, picture.offset if picture is not None else None),
            captions,
            score_of(values.get(s.aesthetic_column or "")),
            additional_of(s.additional_columns, values),
        )

    def _limit(self, extension: str) -> int:
        return MAX_PICTURE if extension in self.pictures_are else self._limit_of_text(extension)

    def _limit_of_text(self, extension: str) -> int:
        is_read = extension == "json" or (extension == "txt" and self.has_text)
        return MAX_TEXT if is_read else 0


def _count(path: str) -> int:
    """How many paths braces of numbers and lists expand to. Raises ValueError."""
    levels = [[0, 1]]  # of each open brace: paths before its last comma, and behind it
    for token in BRACES.finditer(path):
        first, last, step = token.groups()
        if first is not None:
            levels[-1][1] *= abs(int(last) - int(first)) // (int(step or 1) or 1) + 1
        elif token[0] == "{":
            levels.append([0, 1])
        elif len(levels) > 1 and token[0] == ",":
            levels[-1] = [sum(levels[-1]), 1]
        elif len(levels) > 1:
            alternatives = sum(levels.pop())
            levels[-1][1] *= alternatives
    return levels[0][1]


def _json(sample: Sample) -> dict[str, Any] | None:
    """The values of a sample's json; None if it is malformed."""
    if "json" not in sample.files:
        return {}
    try:
        values = json.loads(sample.files["json"].content or b"", parse_int=integer)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


@contextmanager
def _opened(file: str) -> Iterator[IO[bytes]]:
    with reading(file), open_file(file) as stream:
        yield stream
