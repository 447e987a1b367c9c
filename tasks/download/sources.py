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
from tasks.download.list_files import ListedFile, list_files, require_columns
from tasks.download.tars import Tars


class UrlList(lists.Source):
    """Lists of image URLs."""

    def __init__(self, settings: UrlSource) -> None:
        self.settings = settings
        self.format = lists.FORMATS[settings.format]

    def check(self) -> None:
        file = self._files()[0].name
        named = lists.named_columns(self.settings)
        require_columns(named, self.format.columns(file), file)
        if self.settings.format == "parquet":
            texts = ("source.url_column", "source.caption_column")
            lists.require_text({name: named[name] for name in texts if name in named}, file)

    def pieces(self) -> Iterator[lists.Piece]:
        for file in self._files():
            yield lists.Piece(
                lists.identity(self.settings, [file]),
                partial(lists.read_list, file.name, self.settings),
                partial(lists.read_malformed_list, file.name, self.settings),
            )

    def open(self) -> AbstractContextManager[lists.ServedAt]:
        return nullcontext(lists.ServedAt(self.settings.base_url))

    def _files(self) -> list[ListedFile]:
        return list_files(self.settings.path, self.format.suffixes)


class Digits(lists.Source):
    """The demo's digits: rendered into the cache, served on loopback and read as a URL list."""

    def __init__(self, settings: DigitsSource) -> None:
        self.settings = settings
        name = f"digits-{settings.seed}-{settings.count}-{settings.rehearsal}"
        self.folder = cache_folder() / "demo" / name
        path = str(self.folder / "urls.parquet")
        self.list = UrlList(UrlSource(kind="urls", path=path, sha256_column="sha256"))

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
        for piece in self.list.pieces():
            yield from piece.read()

    def _draw(self) -> None:
        from demo import dataset

        try:
            settings = self.settings
            dataset.write(
                self.folder, seed=settings.seed, count=settings.count, rehearsal=settings.rehearsal
            )
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
