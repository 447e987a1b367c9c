"""What every kind of source is: pieces of rows, and pictures at their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from artifacts.records import digest_bytes, digest_json
from configs.settings.base_section import Section
from configs.settings.data import DatasetSource, FolderSource, TarsSource, UrlSource
from tasks.download.list_files import ListedFile
from tasks.download.read_lists_by_duckdb import additional_settings


class ServedAt(NamedTuple):
    """The base of relative URLs and the private hosts to allow, while a source is open."""

    base_url: str | None = None
    allow_hosts: tuple[str, ...] = ()  # host or host:port with a private address


class Piece(NamedTuple):
    """Consecutive rows of a source, such as a file: read again only if it changed."""

    identity: str  # sha256 (hex) of names, stamps and settings: equal ones have equal rows
    read: Callable[[], Iterator[pa.Table]]  # tables of HASHED; SourceError, MalformedList
    #: Reads all rows after a MalformedList.
    read_malformed: Callable[[], Iterator[pa.Table]] = lambda: iter(())


class PictureLocation(NamedTuple):
    """Where a source has a picture."""

    file: str  # the picture, or the parquet file or tar that has it
    row: int | None  # number in a parquet file; offset of a tar's header in bytes; else None


class Source(Protocol):
    """One kind of source."""

    def check(self) -> None:
        """Raise SourceError if the source is unusable. Runs before the first stage, so cheap."""

    def pieces(self) -> Iterator[Piece]:
        """All rows, in order; nothing is read before `Piece.read`. Raises SourceError."""

    def pictures(self, places: Iterable[PictureLocation]) -> Iterator[bytes | None]:
        """The pictures embedded at `places`, in the source's order; None for one that is gone.

        Raises SourceError.
        """

    def open(self) -> AbstractContextManager[ServedAt]:
        """Make the rows' URLs reachable, by a local server if one is needed. Raises SourceError."""


def named_columns(
    settings: UrlSource | FolderSource | DatasetSource | TarsSource,
) -> dict[str, str]:
    """{setting: column} of the columns that are configured."""
    named = {f"source.{name}": value for name, value in settings if name.endswith("_column")}
    chosen = {setting: column for setting, column in named.items() if column is not None}
    return chosen | additional_settings(settings.additional_columns)


def identity(settings: Section, files: list[ListedFile]) -> str:
    """Identity of the piece of some files: of the settings, and of names and stamps."""
    meaning = settings.model_dump(mode="json", exclude={"path", "port"})
    return digest_json([meaning, *(file.stamp for file in files)])


def embedded_row(
    picture: bytes | None,
    place: PictureLocation,
    captions: tuple[str, ...],
    score: float | None,
    additional: str | None = None,
) -> dict[str, Any]:
    """The row of COLUMNS of a picture in the source, identified by its content."""
    row: dict[str, Any] = {"url": "", "captions": captions, "aesthetic_score": score}
    row["additional"] = additional
    if picture is None:
        return row
    sha256 = digest_bytes(picture)
    return {**row, "url": f"sha256:{sha256}", "sha256": sha256, **place._asdict()}
