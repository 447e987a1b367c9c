"""One row of a source: its captions, its picture's location, and its identity."""

from __future__ import annotations

import math
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

#: Columns of rows. A picture embedded in the source has a `file`, and a row number in it or null.
COLUMNS = pa.schema(
    [
        ("url", pa.string()),
        ("captions", pa.list_(pa.string())),
        ("sha256", pa.string()),
        ("aesthetic_score", pa.float64()),
        ("file", pa.string()),
        ("row", pa.int64()),
    ]
)
HASHED = COLUMNS.append(pa.field("hash", pa.binary()))  # of row_hash
HASH_SIZE = 32  # bytes


@dataclass(frozen=True)
class Row:
    """One picture to fetch. A row with neither `url` nor `file` has no picture."""

    url: str  # as listed; sha256:<hex> for a picture embedded in the source
    captions: tuple[str, ...]
    sha256: str | None = None  # of the picture's bytes, hex
    aesthetic_score: float | None = None
    file: str | None = None  # local copy of an embedded picture
    hash: str = field(default="", compare=False)  # of row_hash, hex


def row_hash(base_url: str | None) -> str:
    """SQL expression: sha256 of a row's captions, its picture and its score, as 32 bytes.

    The picture's digest identifies it, or without a digest its absolute URL: a URL that is signed
    again leads to the same picture. Each text has its length in bytes in front, so that no two
    rows are one text.
    """
    url = "url"
    if base_url is not None:
        base = literal(f"{base_url.rstrip('/')}/")
        url = f"if(regexp_matches(url, '^[A-Za-z][A-Za-z0-9+.-]*:'), url, {base} || url)"
    picture = f"if(sha256 is null, 'url ' || {_measured(url)}, 'sha256 ' || {_measured('sha256')})"
    captions = f"array_to_string(list_transform(captions, lambda c: {_measured('c')}), ' ')"
    score = "if(aesthetic_score is null, '', printf(' score %.17g', aesthetic_score))"
    return f"unhex(sha256({picture} || ' captions ' || {captions} || {score}))"


def _measured(text: str) -> str:
    return f"(strlen({text}) || ':' || {text})"


def literal(text: str) -> str:
    """A text as SQL."""
    return "'" + text.replace("'", "''") + "'"


def absolute(url: str, base_url: str | None) -> str:
    """A listed URL, joined to `base_url` if there is one. Raises ValueError if it is invalid."""
    return url if base_url is None else urllib.parse.urljoin(f"{base_url.rstrip('/')}/", url)


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
