"""Content keys: canonical JSON, digests, and content-defined shard boundaries."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import IO, Any, TypeVar

Row = TypeVar("Row")
CHUNK = 2**20


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys, no spaces and no NaN: equal values give equal bytes."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def parse_json(text: str | bytes) -> Any:
    """The value of JSON text. Raises ValueError, also for nesting too deep for Python."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def digest_json(value: Any) -> str:
    """sha256 (hex) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def digest_bytes(data: bytes) -> str:
    """sha256 (hex) of `data`."""
    return hashlib.sha256(data).hexdigest()


def digest_stream(stream: IO[bytes]) -> tuple[str, int]:
    """sha256 (hex) and byte count of the rest of `stream`."""
    digest, size = hashlib.sha256(), 0
    while chunk := stream.read(CHUNK):
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size


def cut_shards(rows: Iterable[tuple[str, Row]], average: int) -> Iterator[list[tuple[str, Row]]]:
    """Cut `rows` of (sha256 hex, row) into shards at content-defined boundaries.

    A shard has at least `average / 2` and at most `2 * average` rows. Between these limits it ends
    at the first row whose hash meets a condition of probability about `2 / average`. An added or
    removed row therefore moves nearby boundaries only (content-defined chunking as in LBFS, SOSP
    2001).
    """
    least, most = max(1, average // 2), max(1, average * 2)
    every = average - least + 1
    shard: list[tuple[str, Row]] = []
    for row_hash, row in rows:
        shard.append((row_hash, row))
        ends = len(shard) >= least and int(row_hash[:8], 16) % every == 0
        if ends or len(shard) == most:
            yield shard
            shard = []
    if shard:
        yield shard
