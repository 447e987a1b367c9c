"""Which samples a step trains on. For any shards: test_sample_order_properties.py."""

import pytest

from configs.errors import Refused
from runtimes.data.sample_order import Order, SampleIndex, SourceStream, evenly_spaced

SHARDS = [
    {"train/8x8": 7, "train/4x12": 2, "holdout/8x8": 3},
    {"train/8x8": 5, "train/6x6": 1},
    {"train/4x12": 4, "holdout/4x12": 2},
    {"train/8x8": 6},
]


def order(batch_size: int = 4, seed: int = 1, window: int = 2) -> Order:
    return Order(SHARDS, batch_size=batch_size, seed=seed, window=window)


def items(stream: SourceStream, start: int, count: int) -> list[SampleIndex]:
    return [stream.sample(item) for item in range(start, start + count)]


def test_what_does_not_fill_a_batch_is_carried_over() -> None:
    ours = Order([{"train/8x8": 5}], batch_size=4, seed=0, window=1)
    assert [ours.steps_before(epoch) for epoch in range(5)] == [0, 1, 2, 3, 5]
    first_two = ours.batch(0) + ours.batch(1)
    assert len(set(first_two[:5])) == 5


def test_steps_find_their_epoch() -> None:
    for batch_size in (1, 3, 7, 40):
        ours = order(batch_size)
        for step in range(100):
            epoch = ours.epoch_of(step)
            assert ours.steps_before(epoch) <= step < ours.steps_before(epoch + 1)


def test_epochs_and_seeds_differ() -> None:
    one = SourceStream("train/8x8", 0, [50, 50], seed=0, window=2)
    other = SourceStream("train/8x8", 0, [50, 50], seed=1, window=2)
    first = items(one, 0, 100)
    assert first != items(one, 100, 100)
    assert first != items(other, 0, 100)


def test_a_window_keeps_to_its_shards() -> None:
    """Samples are mixed over `window` shards, and never more than these are needed at once."""
    stream = items(SourceStream("train/8x8", 0, [10] * 12, seed=0, window=3), 0, 120)
    windows = [{place.shard for place in stream[start : start + 30]} for start in range(0, 120, 30)]
    assert [len(shards) for shards in windows] == [3, 3, 3, 3]
    assert set().union(*windows) == set(range(12))
    assert {place.shard for place in stream[:12]} == windows[0], "the window is not mixed"


def test_nothing_to_train_on_is_wrong_input() -> None:
    with pytest.raises(Refused, match="no sample of the split 'train'"):
        Order([{"holdout/8x8": 3}], batch_size=4, seed=0, window=1)


def test_spread_takes_held_out_samples_evenly() -> None:
    assert len(evenly_spaced(SHARDS, "holdout", 100)) == 5
    assert evenly_spaced(SHARDS, "holdout", 2) == [
        SampleIndex(0, "holdout/8x8", 0),
        SampleIndex(0, "holdout/8x8", 2),
    ]
    assert evenly_spaced(SHARDS, "test", 2) == []


def test_every_epoch_has_shards_in_an_order_of_its_own() -> None:
    stream = SourceStream("train/8x8", 0, [1] * 8, seed=1, window=1)
    epochs = [tuple(place.shard for place in items(stream, 8 * epoch, 8)) for epoch in range(5)]
    assert len(set(epochs)) == 5
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
