"""Rows as (sha256 hex, row), cut into shards."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from tasks.download.shard_boundaries import shard_ends

Row = TypeVar("Row")


def cut_shards(rows: Sequence[tuple[str, Row]], average: int) -> list[list[tuple[str, Row]]]:
    """The shards of a list, which ends the last one."""
    prefixes = np.array([int(row_hash[:8], 16) for row_hash, _ in rows], np.uint32)
    ends = shard_ends(prefixes, average)
    cut = [list(rows[a:b]) for a, b in zip([0, *ends], [*ends, len(rows)], strict=True)]
    return [shard for shard in cut if shard]
