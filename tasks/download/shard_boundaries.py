"""Cut the rows of a source into shards, at boundaries that the rows' contents define."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

Row = TypeVar("Row")


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
