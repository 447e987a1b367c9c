"""Shard boundaries."""

import hashlib

import pytest
from cut_rows import cut_shards

from configs.settings.download import Download


def rows(count: int) -> list[tuple[str, int]]:
    return [(hashlib.sha256(str(i).encode()).hexdigest(), i) for i in range(count)]


@pytest.mark.parametrize("average", [1, 2, 10, 100])
def test_shards_hold_every_row_once_and_keep_their_sizes(average: int) -> None:
    shards = list(cut_shards(rows(5000), average))
    assert [row for shard in shards for row in shard] == rows(5000)
    assert all(len(shard) <= 2 * average for shard in shards)
    assert all(len(shard) >= max(1, average // 2) for shard in shards[:-1])
    assert 0.6 * average <= 5000 / len(shards) <= 1.4 * average


@pytest.mark.parametrize("where", [0, 1234, 4999])
def test_a_row_added_changes_only_shards_near_it(where: int) -> None:
    before = rows(5000)
    added = (hashlib.sha256(b"new").hexdigest(), -1)
    after = [*before[:where], added, *before[where:]]
    old = {tuple(shard) for shard in cut_shards(before, 100)}
    new = {tuple(shard) for shard in cut_shards(after, 100)}
    assert len(new - old) <= 3


def test_rows_of_the_largest_shard_have_numbers_of_five_digits() -> None:
    """Else the keys in its tar would not be in order, after all its pictures were fetched."""
    assert len(str(2 * Download(shard_size=50_000).shard_size - 1)) == 5
    with pytest.raises(ValueError, match="less than or equal to 50000"):
        Download(shard_size=50_001)
