"""Sources of rows: URL lists, picture folders, datasets with embedded pictures, the demo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import fsspec
from fsspec.core import url_to_fs

from artifacts.resolve_model import cache_folder
from configs.source import DatasetSource, DigitsSource, FolderSource, UrlSource
from tasks.download.errors import SourceError
from tasks.download.parquet_csv_jsonl import (
    FORMATS,
    JsonlList,
    ParquetList,
    Span,
    check_absent,
    is_glob,
    list_files,
    reading,
    require_columns,
)
from tasks.download.row_hash_cache import cached_row_hashes
from tasks.download.rows import Row, ScratchFiles, captions_of, embedded_row, score_of, text_of
from tasks.download.serve_folder import check_port, serve_folder

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")


class ServedAt(NamedTuple):
    """The base of relative URLs and the private hosts to allow, while a source is open."""

    base_url: str | None = None
    allow_hosts: tuple[str, ...] = ()  # host or host:port with a private address


class Source(Protocol):
    """One kind of source."""

    def check(self) -> None:
        """Raise SourceError if the source is unusable. Runs before the first stage, so cheap."""

    def scan(self) -> Iterator[tuple[str, Span]]:
        """(row hash, span) of every row, in order, with few rows in memory. Raises SourceError."""

    def read(self, spans: Iterable[Span], scratch: Path) -> Iterator[Row]:
        """The rows of `spans`; embedded pictures are copied to `scratch`. Raises SourceError."""

    def files(self) -> list[str]:
        """The files whose changes are changes of the source. Raises SourceError."""

    def open(self) -> AbstractContextManager[ServedAt]:
        """Make the rows' URLs reachable, by a local server if one is needed. Raises SourceError."""


class UrlList:
    """Lists of image URLs."""

    def __init__(self, settings: UrlSource) -> None:
        self.settings = settings
        self.format = FORMATS[settings.format]
        self.columns = _columns(settings)

    def check(self) -> None:
        file = self.files()[0]
        require_columns(self.columns, self.format.columns(file), file)

    def scan(self) -> Iterator[tuple[str, Span]]:
        for file in self.files():
            for start, stop, values in self.format.rows(file, self.columns.values()):
                yield self._row(values).hash, Span(file, start, stop)

    def read(self, spans: Iterable[Span], scratch: Path) -> Iterator[Row]:
        for file, start, stop in spans:
            for _, _, values in self.format.rows(file, self.columns.values(), start, stop):
                yield self._row(values)

    def open(self) -> AbstractContextManager[ServedAt]:
        return nullcontext(ServedAt(self.settings.base_url))

    def files(self) -> list[str]:
        return list_files(self.settings.path, self.format.suffixes)

    def _row(self, values: dict[str, Any]) -> Row:
        s = self.settings
        return Row(
            text_of(values[s.url_column]),
            captions_of(values.get(s.caption_column or "")),
            text_of(values.get(s.sha256_column or "")).lower() or None,
            base_url=s.base_url,
            aesthetic_score=_score(values, s),
        )


class Folder:
    """A folder of pictures: one row per picture, or per line of metadata.jsonl if present.

    Without metadata.jsonl, the caption of `name.jpg` is the text of `name.txt`.
    """

    METADATA = "metadata.jsonl"

    def __init__(self, settings: FolderSource) -> None:
        self.settings = settings
        self.columns = {"source.path": "file_name", **_columns(settings)}
        self.list = JsonlList()

    def check(self) -> None:
        metadata = self._metadata()
        if metadata is None:
            if self.settings.aesthetic_column is not None:
                folder = self.settings.path
                raise SourceError(f"source.aesthetic_column: {folder} has no {self.METADATA}")
            list_files(self.settings.path, PICTURES)
            return
        require_columns(self.columns, self.list.columns(metadata), metadata)

    def scan(self) -> Iterator[tuple[str, Span]]:
        metadata = self._metadata()
        if metadata is None:
            for file in list_files(self.settings.path, PICTURES):
                yield self._sidecar_row(file, None).hash, Span(file, 0, 0)
            return
        for start, stop, values in self.list.rows(metadata, self.columns.values()):
            yield self._listed_row(metadata, values, None).hash, Span(metadata, start, stop)

    def read(self, spans: Iterable[Span], scratch: Path) -> Iterator[Row]:
        save = ScratchFiles(scratch)
        for file, start, stop in spans:
            if not file.endswith(f"/{self.METADATA}"):
                yield self._sidecar_row(file, save)
                continue
            for _, _, values in self.list.rows(file, self.columns.values(), start, stop):
                yield self._listed_row(file, values, save)

    def open(self) -> AbstractContextManager[ServedAt]:
        return nullcontext(ServedAt())

    def files(self) -> list[str]:
        metadata = self._metadata()
        if metadata is not None:
            return [metadata]
        return list_files(self.settings.path, (*PICTURES, ".txt"))

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

    def _sidecar_row(self, file: str, save: Callable[[bytes], str] | None) -> Row:
        text = _bytes_at(f"{file.rpartition('.')[0]}.txt") or b""
        caption = text.decode(errors="replace").removeprefix("\ufeff").strip()
        return embedded_row(_bytes_at(file), (caption,), save)

    def _listed_row(
        self, metadata: str, values: dict[str, Any], save: Callable[[bytes], str] | None
    ) -> Row:
        name = text_of(values["file_name"])
        if name.startswith("/") or ".." in name.split("/") or "://" in name:
            raise SourceError(f"source: {metadata}: file_name {name!r} leads out of the folder")
        picture = _bytes_at(f"{metadata.rpartition('/')[0]}/{name}") if name else None
        captions = captions_of(values[self.settings.caption_column])
        return embedded_row(picture, captions, save, _score(values, self.settings))


class Dataset:
    """Parquet files with embedded pictures: bytes, or Hugging Face's {bytes, path} structs."""

    def __init__(self, settings: DatasetSource) -> None:
        self.settings = settings
        self.columns = _columns(settings)
        self.list = ParquetList(batch_size=32)  # pictures in memory at a time

    def check(self) -> None:
        file = self.files()[0]
        require_columns(self.columns, self.list.columns(file), file)

    def scan(self) -> Iterator[tuple[str, Span]]:
        for file in self.files():
            hashes = cached_row_hashes(
                file, list(self.columns.values()), partial(self._hashes, file)
            )
            for number, row_hash in enumerate(hashes):
                yield row_hash, Span(file, number, number + 1)

    def read(self, spans: Iterable[Span], scratch: Path) -> Iterator[Row]:
        save = ScratchFiles(scratch)
        for file, start, stop in spans:
            for _, _, values in self.list.rows(file, self.columns.values(), start, stop):
                yield self._row(values, save)

    def open(self) -> AbstractContextManager[ServedAt]:
        return nullcontext(ServedAt())

    def _hashes(self, file: str) -> Iterator[str]:
        for _, _, values in self.list.rows(file, self.columns.values()):
            yield self._row(values, None).hash

    def files(self) -> list[str]:
        path, split = self.settings.path, self.settings.split
        if "://" not in path and path.count("/") == 1 and not Path(path).exists():
            revision = f"@{self.settings.revision}" if self.settings.revision else ""
            path = f"hf://datasets/{path}{revision}"
        found = list_files(path, self.list.suffixes)
        if found == [path] or is_glob(path):
            return found
        # <split>-00000-of-00001.parquet, or <split>/0000.parquet in the hub's conversions
        chosen = [f for f in found if any(part.startswith(split) for part in f.split("/")[-2:])]
        if not chosen:
            names = ", ".join(f.rpartition("/")[2] for f in found[:5])
            raise SourceError(f"source.split: {path} has no files of split {split!r} ({names})")
        return chosen

    def _row(self, values: dict[str, Any], save: Callable[[bytes], str] | None) -> Row:
        image = values[self.settings.image_column]
        picture = image.get("bytes") if isinstance(image, dict) else image
        if not isinstance(picture, bytes | None):
            raise SourceError(
                f"source.image_column: {self.settings.image_column} holds "
                f"{type(picture).__name__}, not encoded pictures (bytes, or a struct with bytes)"
            )
        captions = captions_of(values[self.settings.caption_column])
        return embedded_row(picture, captions, save, _score(values, self.settings))


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

    def scan(self) -> Iterator[tuple[str, Span]]:
        self._draw()
        return self.list.scan()

    def read(self, spans: Iterable[Span], scratch: Path) -> Iterator[Row]:
        return self.list.read(spans, scratch)

    def open(self) -> AbstractContextManager[ServedAt]:
        self._draw()
        return serve_folder(self.folder, self.settings.port, ServedAt)

    def files(self) -> list[str]:
        return []  # the settings are the source

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
    "digits": Digits,
}


def _columns(settings: UrlSource | FolderSource | DatasetSource) -> dict[str, str]:
    """{setting: column} of the columns that are configured."""
    named = {f"source.{name}": value for name, value in settings if name.endswith("_column")}
    return {setting: column for setting, column in named.items() if column is not None}


def _score(
    values: dict[str, Any], settings: UrlSource | FolderSource | DatasetSource
) -> float | None:
    return score_of(values.get(settings.aesthetic_column or ""))


def _bytes_at(file: str) -> bytes | None:
    with reading(file):
        try:
            with fsspec.open(file, "rb") as stream:
                return bytes(stream.read())
        except (FileNotFoundError, IsADirectoryError):
            return None
