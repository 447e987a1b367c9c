"""Shard boundaries: each row once, the limits of sizes, and what a changed row moves."""

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import strategies as st
from property_tests import holds_for

from configs.settings.data import Download
from tasks.download.rows import shard_ends

Row = tuple[str, int]  # sha256 hex, number
ROWS = st.integers(0, 400)
AVERAGE = st.integers(1, 40)


def rows(count: int, salt: int) -> list[Row]:
    return [(hashlib.sha256(f"{salt} {n}".encode()).hexdigest(), n) for n in range(count)]


def cut_shards(rows: Sequence[Row], average: int) -> list[list[Row]]:
    """The shards of a list, which ends the last one."""
    prefixes = np.array([int(row_hash[:8], 16) for row_hash, _ in rows], np.uint32)
    ends = shard_ends(prefixes, average)
    cut = [list(rows[a:b]) for a, b in zip([0, *ends], [*ends, len(rows)], strict=True)]
    return [shard for shard in cut if shard]


@holds_for(count=ROWS, average=AVERAGE, salt=st.integers(0, 99))
def test_shards_have_every_row_once_in_order_and_their_sizes(
    count: int, average: int, salt: int
) -> None:
    shards = cut_shards(rows(count, salt), average)
    assert [row for shard in shards for row in shard] == rows(count, salt)
    least, most = max(1, average // 2), 2 * average
    assert all(least <= len(shard) <= most for shard in shards[:-1])
    assert all(0 < len(shard) <= most for shard in shards[-1:])


@holds_for(
    200,
    count=st.integers(1, 400),
    average=AVERAGE,
    salt=st.integers(0, 99),
    at=st.integers(0, 399),
    added=st.booleans(),
)
def test_a_row_added_or_removed_changes_only_shards_up_to_the_next_common_boundary(
    count: int, average: int, salt: int, at: int, added: bool
) -> None:
    before, at = rows(count, salt), at % count
    new = [(hashlib.sha256(b"new").hexdigest(), -1)] if added else []
    after = [*before[:at], *new, *before[at + (not added) :]]
    old, cut = (cut_shards(given, average) for given in (before, after))
    start = next(n for n, shard in enumerate(old) if before[at] in shard)
    assert cut[:start] == old[:start], "a shard before the row changed"
    ends = [[shard[-1][0] for shard in shards] for shards in (old, cut)]
    for common in set(ends[0][start:]) & set(ends[1][start:]):
        rest = [
            shards[found.index(common) + 1 :]
            for shards, found in zip((old, cut), ends, strict=True)
        ]
        assert rest[0] == rest[1], "a shard behind a common boundary changed"


def test_a_changed_row_mostly_changes_its_own_shard_alone() -> None:
    changed = []
    for at in range(0, 4000, 37):
        before = rows(4000, 0)
        old = {tuple(shard) for shard in cut_shards(before, 50)}
        new = {tuple(shard) for shard in cut_shards(before[:at] + before[at + 1 :], 50)}
        changed.append(len(new - old))
    assert sum(changed) / len(changed) < 2
    assert sorted(changed)[len(changed) // 2] == 1


@pytest.mark.parametrize("average", [1, 2, 10, 100])
def test_shards_have_the_average_size_that_is_asked_for(average: int) -> None:
    assert 0.6 * average <= 5000 / len(cut_shards(rows(5000, 0), average)) <= 1.4 * average


def test_rows_of_the_largest_shard_have_numbers_of_five_digits() -> None:
    """Else the keys in its tar would not be in order, after all its pictures were fetched."""
    assert len(str(2 * Download(shard_size=50_000).shard_size - 1)) == 5
    with pytest.raises(ValueError, match="less than or equal to 50000"):
        Download(shard_size=50_001)
