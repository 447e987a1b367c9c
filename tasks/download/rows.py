"""One row of a source: what identifies it, and where its picture is."""

from __future__ import annotations

import math
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifacts.keys import digest_bytes, digest_json


@dataclass(frozen=True)
class Row:
    """One picture to fetch. Neither a `url` nor a `file` means that the source has lost it."""

    url: str  # as in the list; sha256:<hex> where the source holds the picture itself
    captions: tuple[str, ...]
    sha256: str | None = None  # of the picture's bytes, hex
    file: str | None = None  # local copy, where the source holds the picture itself
    base_url: str | None = None  # what the list's relative URLs are joined to
    aesthetic_score: float | None = None

    @property
    def hash(self) -> str:
        """sha256 (hex) of what identifies the row.

        Where its picture is served counts only if nothing else says which picture it is.
        """
        if self.sha256 is not None:
            named = {"url": self.url, "sha256": self.sha256}
        else:
            named = {"url": self._absolute()}
        if self.aesthetic_score is not None:
            named["aesthetic_score"] = repr(self.aesthetic_score)
        return digest_json({"captions": list(self.captions), **named})

    def _absolute(self) -> str:
        try:
            return absolute(self.url, self.base_url)
        except ValueError:
            return self.url  # it will fail to be fetched, wherever it is


class Keep:
    """Puts pictures into a folder as numbered files, and says where."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def __call__(self, picture: bytes) -> str:
        path = self.folder / f"source-{self.count}"
        path.write_bytes(picture)
        self.count += 1
        return str(path)


def absolute(url: str, base_url: str | None) -> str:
    """A listed URL joined to the base, if there is one. Raises ValueError for what is no URL."""
    return url if base_url is None else urllib.parse.urljoin(f"{base_url.rstrip('/')}/", url)


def held_row(
    picture: bytes | None,
    captions: tuple[str, ...],
    keep: Callable[[bytes], str] | None,
    score: float | None = None,
) -> Row:
    """A row whose picture the source holds; it is named by its content, not by its file's name."""
    if picture is None:
        return Row("", captions, aesthetic_score=score)
    sha256 = digest_bytes(picture)
    file = keep(picture) if keep else None
    return Row(f"sha256:{sha256}", captions, sha256, file, aesthetic_score=score)


def captions_of(value: Any) -> tuple[str, ...]:
    """A caption column's value, which may be a list of captions; at least one, maybe empty."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(text_of(item) for item in value) or ("",)
    return (text_of(value),)


def score_of(value: Any) -> float | None:
    """A score column's value; None for what is no finite number."""
    try:
        score = float(value)
    except (TypeError, ValueError):
        return None
    return score if math.isfinite(score) else None


def text_of(value: Any) -> str:
    """Text that UTF-8 can hold: JSON can smuggle in half a surrogate pair."""
    return "" if value is None else str(value).encode(errors="replace").decode()
