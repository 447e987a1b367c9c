"""Sources of rows: lists of URLs, the demo, and the table of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pyarrow as pa

from artifacts.models import cache_folder
from artifacts.records import digest_json
from configs.errors import Refused
from configs.settings.data import DigitsSource, UrlSource
from tasks.download import lists
from tasks.download.folders import Dataset, Folder, serve_folder
from tasks.download.source_files import ListedFile, list_files
from tasks.download.tars import Tars


class UrlList(lists.Source):
    """Lists of image URLs."""

    def __init__(self, settings: UrlSource) -> None:
        self.settings = settings

    def check(self) -> None:
        lists.require_columns(self.settings, self.settings.format, self._files()[0].name)

    def pieces(self) -> Iterator[lists.Piece]:
        for file in self._files():
            read = partial(lists.read_list, file.name, self.settings)
            read_malformed = partial(lists.read_malformed_list, file.name, self.settings)
            yield lists.piece_of(self.settings, [file], read, read_malformed)

    def open(self) -> AbstractContextManager[lists.ServedAt]:
        return nullcontext(lists.ServedAt(self.settings.base_url))

    def _files(self) -> list[ListedFile]:
        return list_files(self.settings.path, lists.FORMATS[self.settings.format].suffixes)


class Digits(lists.Source):
    """The demo's digits: rendered into the cache, served on loopback and read as a URL list."""

    def __init__(self, settings: DigitsSource) -> None:
        self.settings = settings
        name = f"digits-{settings.seed}-{settings.count}-{settings.rehearsal}"
        self.folder = cache_folder() / "demo" / name
        path = str(self.folder / "urls.parquet")
        self.list = UrlSource(kind="urls", path=path, sha256_column="sha256")

    def check(self) -> None:
        with serve_folder(self.folder, self.settings.port, lists.ServedAt):
            pass  # the port is free

    def pieces(self) -> Iterator[lists.Piece]:
        yield lists.Piece(
            digest_json(self.settings.model_dump(mode="json", exclude={"port"})), self._rows
        )

    def open(self) -> AbstractContextManager[lists.ServedAt]:
        self._draw()
        return serve_folder(self.folder, self.settings.port, lists.ServedAt)

    def _rows(self) -> Iterator[pa.Table]:
        self._draw()
        yield from lists.read_list(self.list.path, self.list)

    def _draw(self) -> None:
        from demo import dataset

        s = self.settings
        try:
            dataset.write(self.folder, seed=s.seed, count=s.count, rehearsal=s.rehearsal)
        except OSError as error:
            raise Refused(
                f"source: the demo's pictures cannot be written to {self.folder} "
                f"({error.strerror or error}): set KILN_CACHE to a writable folder"
            ) from error


SOURCES: dict[str, Callable[[Any], lists.Source]] = {
    "urls": UrlList,
    "folder": Folder,
    "dataset": Dataset,
    "tars": Tars,
    "digits": Digits,
}
