"""One row of a source: its captions, its identity and the location of its picture."""

from __future__ import annotations

import math
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifacts.digests import digest_bytes, digest_json


@dataclass(frozen=True)
class Row:
    """One picture to fetch. A row with neither `url` nor `file` has no picture."""

    url: str  # as listed; sha256:<hex> for a picture embedded in the source
    captions: tuple[str, ...]
    sha256: str | None = None  # of the picture's bytes, hex
    file: str | None = None  # local copy of an embedded picture
    base_url: str | None = None  # base of the list's relative URLs
    aesthetic_score: float | None = None

    @property
    def hash(self) -> str:
        """sha256 (hex) of the row's captions, its picture and its score.

        The picture's digest identifies it, or without a digest its absolute URL: a URL that is
        signed again leads to the same picture.
        """
        named = {"url": self._absolute()} if self.sha256 is None else {"sha256": self.sha256}
        if self.aesthetic_score is not None:
            named["aesthetic_score"] = repr(self.aesthetic_score)
        return digest_json({"captions": list(self.captions), **named})

    def _absolute(self) -> str:
        try:
            return absolute(self.url, self.base_url)
        except ValueError:
            return self.url  # an invalid URL fails at any base


class ScratchFiles:
    """Writes pictures to numbered files of a folder and returns their paths."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def __call__(self, picture: bytes) -> str:
        path = self.folder / f"source-{self.count}"
        path.write_bytes(picture)
        self.count += 1
        return str(path)


def absolute(url: str, base_url: str | None) -> str:
    """A listed URL, joined to `base_url` if there is one. Raises ValueError if it is invalid."""
    return url if base_url is None else urllib.parse.urljoin(f"{base_url.rstrip('/')}/", url)


def embedded_row(
    picture: bytes | None,
    captions: tuple[str, ...],
    save: Callable[[bytes], str] | None,
    score: float | None = None,
) -> Row:
    """The row of a picture embedded in the source, identified by its content.

    `save` writes the picture to a file and returns its path; without it the row has no file.
    """
    if picture is None:
        return Row("", captions, aesthetic_score=score)
    sha256 = digest_bytes(picture)
    file = save(picture) if save else None
    return Row(f"sha256:{sha256}", captions, sha256, file, aesthetic_score=score)


def captions_of(value: Any) -> tuple[str, ...]:
    """The captions in a column's value, a string or a list; at least one, which may be empty."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(text_of(item) for item in value) or ("",)
    return (text_of(value),)


def score_of(value: Any) -> float | None:
    """The score in a column's value; None unless it is a finite number."""
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError):  # of an integer above 1e308
        return None
    return score if math.isfinite(score) else None


def text_of(value: Any) -> str:
    """The value as valid UTF-8 text: JSON may contain unpaired surrogates."""
    return "" if value is None else str(value).encode(errors="replace").decode()
