"""Rows of a source: their fields, their identity, and the shards that they are cut into.

The errors of the download stage come first. A row is its captions, its picture's location, and its
identity. The rows' contents define the boundaries of shards.
"""

from __future__ import annotations

import codecs
import json
import math
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from artifacts.records import canonical_json
from configs.errors import Away
from configs.secrets import without_secrets


class Outage(Away):
    """Most rows of several shards in a row failed for transient reasons: another run may succeed.

    The message is one line.
    """


_PLACE = pa.struct({"url": pa.string(), "file": pa.string(), "row": pa.int64()})
#: Columns of pictures beside a picture.
COMPANIONS = ("mask", "control")
#: Columns of rows. A picture embedded in the source has a `file` and a `row`, as PictureLocation.
#: `additional` is a canonical JSON object of further columns, or null if none is kept. `mask` and
#: `control` have the URL and the place of the picture's mask and control picture, or null.
#: `references` has those of its references, or null if there are none; they are no part of a row's
#: hash.
COLUMNS = pa.schema(
    [
        ("url", pa.string()),
        ("captions", pa.list_(pa.string())),
        ("sha256", pa.string()),
        ("aesthetic_score", pa.float64()),
        ("file", pa.string()),
        ("row", pa.int64()),
        ("additional", pa.string()),
        ("mask", _PLACE),
        ("control", _PLACE),
        ("references", pa.list_(_PLACE)),
    ]
)
#: URL of a mask that is the alpha channel of its picture.
ALPHA = "alpha"
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
    additional: Mapping[str, Any] = field(default_factory=dict)  # JSON values of further columns
    place: str = field(default="", compare=False)  # of an embedded picture in the source
    mask: Row | None = None  # its `url` is ALPHA, or it is fetched as a picture is
    control: Row | None = None  # fetched as a picture is


def row_hash(base_url: str | None) -> str:
    """SQL expression: sha256 of a row's picture and its other values, as 32 bytes.

    The picture's digest identifies it, or without a digest its absolute URL: a URL that is signed
    again leads to the same picture. Each text has its length in bytes in front, so that no two
    rows are one text.
    """

    def of_url(url: str) -> str:
        if base_url is None:
            return url
        base = literal(f"{base_url.rstrip('/')}/")
        return f"if(regexp_matches({url}, '^[A-Za-z][A-Za-z0-9+.-]*:'), {url}, {base} || {url})"

    picture = f"coalesce(sha256, {of_url('url')})"
    captions = f"list_transform(captions, lambda c: concat({_measured('c')}))"
    parts = (
        "if(sha256 is null, 'url ', 'sha256 ')",
        _measured(picture),
        "' captions '",
        f"array_to_string({captions}, ' ')",
        "if(aesthetic_score is null, '', printf(' score %.17g', aesthetic_score))",
        f"if(additional is null, '', concat(' additional ', {_measured('additional')}))",
        f"if(mask is null, '', concat(' mask ', {_measured(of_url('mask.url'))}))",
        f"if(control is null, '', concat(' control ', {_measured(of_url('control.url'))}))",
    )
    return f"unhex(sha256(concat({', '.join(parts)})))"  # `||` copies the text once for each part


def _measured(text: str) -> str:
    return f"strlen({text}), ':', {text}"


def literal(text: str) -> str:
    """A text as SQL."""
    return "'" + text.replace("'", "''") + "'"


def absolute(url: str, base_url: str | None) -> str:
    """A listed URL, joined to `base_url` if there is any. Raises ValueError if it is invalid."""
    return url if base_url is None else urllib.parse.urljoin(f"{base_url.rstrip('/')}/", url)


def captions_of(value: Any) -> tuple[str, ...]:
    """The captions in a column's value, a string or a list; at least one, which may be empty.

    An object of JSON is no caption, nor is a list in a list.
    """
    items = [value] if isinstance(value, str | bytes) or not isinstance(value, Sequence) else value
    texts = [item for item in items if not isinstance(item, Mapping | list)]
    return tuple(text_of(item) for item in texts if item is not None) or ("",)


def score_of(value: Any) -> float | None:
    """The score in a column's value; None unless it is a finite number."""
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError):  # of an integer above 1e308
        return None
    return score if math.isfinite(score) else None


def additional_of(columns: Sequence[str], values: Mapping[str, Any]) -> str | None:
    """The value of `additional` for the chosen columns of a line or a row."""
    chosen = {name: values.get(name) for name in columns}
    return text_of(json.dumps(chosen, ensure_ascii=False, default=text_of)) if columns else None


def canonical_additional(text: str | None) -> str | None:
    """The JSON of equal values by every reader, without the secrets of URLs among them.

    A URL that is signed again is therefore the same value. A row with a list too deep for Python
    has no columns.
    """
    if text is None:
        return None
    try:
        return canonical_json(_without_secrets(read_additional(text))).decode()
    except RecursionError:
        return "{}"


def read_additional(text: str | None) -> dict[str, Any]:
    """The columns in a value of `additional`; what is no finite JSON value is None."""
    try:
        values = json.loads(
            text or "{}", parse_float=score_of, parse_int=integer, parse_constant=lambda _: None
        )
    except (ValueError, RecursionError):  # a deep list
        return {}
    return dict(values)


def integer(digits: str) -> int | None:
    """An integer of JSON; None for thousands of digits, which Python refuses to read."""
    try:
        return int(digits)
    except ValueError:
        return None


def _without_secrets(value: Any) -> Any:
    if isinstance(value, str):
        return without_secrets(text_of(value)) if "://" in value else text_of(value)
    if isinstance(value, list):
        return [_without_secrets(item) for item in value]
    if isinstance(value, dict):
        return {text_of(name): _without_secrets(item) for name, item in value.items()}
    return value


def text_of(value: Any) -> str:
    """The value as valid UTF-8 text: JSON may contain unpaired surrogates, parquet bytes.

    NaN, which pandas writes for a missing text, is empty.
    """
    if isinstance(value, bytes):
        return text_of_file(value)
    is_missing = value is None or (isinstance(value, float) and math.isnan(value))
    return "" if is_missing else str(value).encode(errors="replace").decode()


def text_of_file(data: bytes) -> str:
    """Text without its byte order mark, by which it may be UTF-16; else it is UTF-8."""
    is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if is_utf16 else "utf-8-sig", errors="replace")


def shard_ends(prefixes: np.ndarray[Any, Any], average: int) -> list[int]:
    """Where shards end: for each, the number of the row behind its last row.

    A shard has at least `average / 2` and at most `2 * average` rows. Between these limits it ends
    at the first row whose hash meets a condition of probability about `2 / average`. An added or
    removed row therefore moves nearby boundaries only (content-defined chunking as in LBFS, SOSP
    2001). The rows behind the last end are no shard yet: further rows decide where it ends.

    Args:
        prefixes: the first four bytes of each row's hash, as a big-endian integer; the first row
            begins a shard.
    """
    least = max(1, average // 2)
    most = max(1, average * 2)
    every = average - least + 1
    marked = np.flatnonzero(prefixes % every == 0) + 1
    ends: list[int] = []
    start = 0
    while start + least <= len(prefixes):
        nearest = np.searchsorted(marked, start + least)
        limit = start + most
        end = min(int(marked[nearest]), limit) if nearest < len(marked) else limit
        if end > len(prefixes):
            break
        ends.append(end)
        start = end
    return ends
