"""Sources of rows: lists of URLs, the demo, and the table of all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from artifacts.models import cache_folder
from artifacts.records import digest_json
from configs.errors import Refused
from configs.settings.data import DigitsSource, DrawnSource, UrlSource
from tasks.download import lists, shard_plan
from tasks.download.folders import Dataset, Folder, serve_folder
from tasks.download.source_files import ListedFile, list_files
from tasks.download.tars import Tars
from tasks.evaluate.metrics import read_prompts


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
        board = "" if settings.board == "green" else f"-{settings.board}"
        edit = "-edit" if settings.edit else ""
        name = f"digits-{settings.seed}-{settings.count}-{settings.rehearsal}{board}{edit}"
        self.folder = cache_folder() / "demo" / name
        path = str(self.folder / "urls.parquet")
        columns = settings.reference_columns
        about = {"sha256_column": "sha256", "reference_columns": columns}
        self.list = UrlSource(kind="urls", path=path, **about)

    def check(self) -> None:
        with serve_folder(self.folder, self.settings.port, lists.ServedAt):
            pass  # the port is free

    def pieces(self) -> Iterator[lists.Piece]:
        names = ("board", "edit")  # younger than stores: a default is in no key
        fields = type(self.settings).model_fields
        default = {n for n in names if getattr(self.settings, n) == fields[n].default}
        facts = self.settings.model_dump(mode="json", exclude={"port"} | default)
        yield lists.Piece(digest_json(facts), self._rows)

    def open(self) -> AbstractContextManager[lists.ServedAt]:
        self._draw()
        return serve_folder(self.folder, self.settings.port, lists.ServedAt)

    def _rows(self) -> Iterator[pa.Table]:
        self._draw()
        yield from lists.read_list(self.list.path, self.list)

    def _draw(self) -> None:
        from demo import dataset

        s = self.settings
        style = f"white chalk on a {s.board} board"
        try:
            counts = {"seed": s.seed, "count": s.count, "rehearsal": s.rehearsal}
            dataset.write(self.folder, **counts, style=style, references=s.edit)
        except OSError as error:
            raise Refused(
                f"source: the demo's pictures cannot be written to {self.folder} "
                f"({error.strerror or error}): set KILN_CACHE to a writable folder"
            ) from error


class Drawn(lists.Source):
    """What the base draws: runs read it as a folder, once tasks/drawn_source.py has drawn it."""

    def __init__(self, settings: DrawnSource) -> None:
        self.settings = settings

    def check(self) -> None:
        if self.settings.file is not None:
            read_prompts("source.file", self.settings.file)


@dataclass(frozen=True)
class ReferencesOf:
    """The references of a source, as a source of pictures of their own."""

    source: Any  # the recipe's section
    kind: str = "references"
    caption_column: None = None
    plan: shard_plan.DownloadPlan | None = field(default=None, repr=False)  # to plan them alone


class References(lists.Source):
    """The distinct references of a planned source, in the order of the rows that name them."""

    def __init__(self, settings: ReferencesOf) -> None:
        self.settings = settings
        self._of = SOURCES[settings.source.kind](settings.source)

    def check(self) -> None:
        self._of.check()

    def pieces(self) -> Iterator[lists.Piece]:
        assert self.settings.plan is not None
        plan = self.settings.plan
        identity = digest_json(["references", plan.artifact.key, [s.key for s in plan.shards]])
        yield lists.Piece(identity, partial(self._rows, plan))

    def pictures(self, places: Iterable[lists.PictureLocation]) -> Iterator[bytes | None]:
        return self._of.references(places)

    def open(self) -> AbstractContextManager[lists.ServedAt]:
        return self._of.open()

    def _rows(self, plan: shard_plan.DownloadPlan) -> Iterator[pa.Table]:
        def rows() -> Iterator[dict[str, Any]]:
            seen = set[str]()
            for _, place in planned_references(plan):
                if place["url"] not in seen:
                    seen.add(place["url"])
                    sha256 = place["url"].removeprefix("sha256:") if place["file"] else None
                    yield {**place, "captions": [""], "sha256": sha256}

        return lists.hash_rows(rows(), getattr(self.settings.source, "base_url", None))


def planned_references(
    plan: shard_plan.DownloadPlan,
) -> Iterator[tuple[tuple[str, int], dict[str, Any]]]:
    """(shard's key, row's number in it) and URL, file and row of each reference, in order.

    Raises Refused if the plan cannot be read.
    """
    key = shard_plan.plan_key()
    for spec in plan.shards:
        named = shard_plan.read_spans(spec.spans, key)["references"].to_pylist()
        for number, places in enumerate(named):
            yield from (((spec.key, number), place) for place in places or ())


SOURCES: dict[str, Callable[[Any], lists.Source]] = {
    "urls": UrlList,
    "folder": Folder,
    "dataset": Dataset,
    "tars": Tars,
    "digits": Digits,
    "drawn": Drawn,
    "references": References,
}
