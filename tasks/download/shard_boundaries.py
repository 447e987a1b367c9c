"""Cut the rows of a source into shards, at boundaries that the rows' contents define."""

from __future__ import annotations

from typing import Any

import numpy as np


def shard_ends(prefixes: np.ndarray[Any, Any], average: int) -> list[int]:
    """Where shards end: for each, the number of the row behind its last one.

    A shard has at least `average / 2` and at most `2 * average` rows. Between these limits it ends
    at the first row whose hash meets a condition of probability about `2 / average`. An added or
    removed row therefore moves nearby boundaries only (content-defined chunking as in LBFS, SOSP
    2001). The rows behind the last end are no shard yet: further rows decide where it ends.

    Args:
        prefixes: the first four bytes of each row's hash, as a big-endian integer; the first row
            begins a shard.
    """
    least, most = max(1, average // 2), max(1, average * 2)
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
