"""A mixture of sources: exact shares of every epoch, evenly spread, on any number of ranks."""

import itertools
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import strategies as st
from property_tests import holds_for

from configs.errors import Refused
from configs.settings.sources import samples_per_epoch
from runtimes.data.sample_order import Order, SampleIndex, largest_first, part_of, split

Mixture = dict[str, dict[str, Any]]
GROUPS = ("train/4x12", "train/8x8", "train/12x4")
NUMBERS = st.decimals("0.01", 3, places=2).map(float)


def of(weight: float | None = None, repeats: float | None = None, role: str | None = None) -> Any:
    return {"weight": weight, "repeats": repeats, "regularisation": role}


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[list[dict[str, int]], list[str], Mixture]:
    """Shards, the source of each, and the mixture: by weights, by repeats or by both."""
    names = [f"s{number}" for number in range(draw(st.integers(1, 6)))]
    weighted = draw(st.sampled_from(["all", "none", "some"]))
    mixture = {}
    for name in names:
        has_weight = weighted == "all" or (weighted == "some" and name != names[-1])
        most = Fraction(9, 10) / len(names)
        weight = draw(NUMBERS) if weighted == "all" else float(round(most * draw(NUMBERS) / 3, 4))
        role = draw(st.sampled_from([None, "images", "prior"]))
        mixture[name] = of(weight or 0.01, None, role) if has_weight else of(None, draw(NUMBERS))
    shards = [{}, {}]
    sources = [names[0], names[-1]]
    for name in names:
        sizes = draw(st.lists(st.integers(0, 9), min_size=3, max_size=3))
        shards += [dict(zip(GROUPS, sizes, strict=True)), {GROUPS[0]: 1}]
        sources += [name] * 2
    return shards, sources, mixture


def counts_of(shards: list[dict[str, int]], sources: list[str]) -> dict[str, int]:
    counts = Counter[str]()
    for shard, source in zip(shards, sources, strict=True):
        counts[source] += sum(shard.values())
    return dict(counts)


def make_order(mixed: tuple[Any, Any, Any], size: int, seed: int = 0) -> Order:
    shards, sources, mixture = mixed
    return Order(shards, batch_size=size, seed=seed, window=2, sources=sources, mixture=mixture)


@holds_for(mixed=mixtures(), seed=st.integers(0, 2**63 - 1))
def test_each_epoch_has_the_samples_of_the_arithmetic(mixed: Any, seed: int) -> None:
    """Batches of one show the epochs without a remainder."""
    shards, sources, mixture = mixed
    order = make_order(mixed, 1, seed)
    expected = samples_per_epoch(mixture, counts_of(shards, sources))
    begun = Counter[str]()
    epochs = min(4, max(1, int(400 // sum(expected.values()))))
    for epoch in range(epochs):
        steps = range(order.steps_before(epoch), order.steps_before(epoch + 1))
        seen = Counter(sources[order.batch(step)[0].shard] for step in steps)
        begun += seen
        for name, samples in expected.items():
            assert abs(seen[name] - samples) < 1
            assert 0 <= (epoch + 1) * samples - begun[name] < 1


@holds_for(30, mixed=mixtures(), size=st.integers(2, 40), world=st.integers(1, 5))
def test_batches_cut_the_streams_of_buckets_and_ranks_cut_the_batches(
    mixed: Any, size: int, world: int
) -> None:
    streams: dict[int, dict[str, list[SampleIndex]]] = {1: {}, size: {}}
    for batch_size, stream in streams.items():
        ranks = [make_order(mixed, batch_size) for _ in range(world)]
        for step in range(200 // batch_size):
            parts = [order.batch(step, rank, world) for rank, order in enumerate(ranks)]
            batch = [index for part in parts for index in part]
            assert len(batch) == batch_size
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            (group,) = {index.group for index in batch}
            stream.setdefault(group, []).extend(batch)
    for group, whole in streams[size].items():
        assert all(a == b for a, b in zip(whole, streams[1].get(group, []), strict=False))


@holds_for(mixed=mixtures(), size=st.integers(1, 9))
def test_a_source_shows_each_sample_of_a_bucket_before_any_again(mixed: Any, size: int) -> None:
    shards, sources, _ = mixed
    order = make_order(mixed, size)
    streams: dict[tuple[str, str], list[SampleIndex]] = {}
    for step in range(400 // size):
        for index in order.batch(step):
            streams.setdefault((sources[index.shard], index.group), []).append(index)
    for (source, group), stream in streams.items():
        own = zip(shards, sources, strict=True)
        count = sum(shard.get(group, 0) for shard, name in own if name == source)
        for start in range(0, len(stream), count):
            assert max(Counter(stream[start : start + count]).values()) == 1


@holds_for(200, sizes=st.lists(st.integers(0, 60), min_size=1, max_size=10))
def test_sources_alternate_evenly_within_an_epoch(sizes: list[int]) -> None:
    total = sum(sizes)
    shares = [split(count, sizes) for count in range(total + 1)]
    for count, parts in enumerate(shares):
        assert sum(parts) == count
        assert all(abs(n - count * s / total) < 2 for n, s in zip(parts, sizes, strict=True) if s)
    assert shares[-1] == sizes
    for item, (before, after) in enumerate(itertools.pairwise(shares)):
        place, size = part_of(item, sizes, largest_first(sizes))
        assert after == [n + (number == place) for number, n in enumerate(before)]
        assert size == before[place]


@pytest.mark.parametrize(
    ("subject", "style", "old", "expected"),
    [
        (of(1), of(1), of(2), (1665, 1665, 3330)),
        (of(None, 10), of(), of(None, 0.1), (600, 600, 600)),
        (of(0.3), of(None, 2), of(0.1), (600, 1200, 200)),
        (of(None, 5), of(), of(role="images"), (300, 600, 900)),
        (of(0.5), of(None, 1, "images"), of(None, 0.1, "prior"), (1200, 600, 600)),
    ],
    ids=["weights", "repeats", "both", "regularisation", "regularisation with repeats"],
)
def test_settings_give_the_samples_of_an_epoch(
    subject: Any, style: Any, old: Any, expected: tuple[int, ...]
) -> None:
    mixture = {"subject": subject, "style": style, "old": old}
    samples = samples_per_epoch(mixture, {"subject": 60, "style": 600, "old": 6000})
    assert samples == dict(zip(mixture, expected, strict=True))


def test_a_weight_is_the_decimal_that_was_written() -> None:
    mixture = {"a": of(0.1), "b": of(0.2), "c": of(0.7)}
    assert samples_per_epoch(mixture, {"a": 1, "b": 2, "c": 7}) == {"a": 1, "b": 2, "c": 7}


def test_a_mixture_of_one_source_has_the_order_of_the_source_alone() -> None:
    shards = [{"train/8x8": 7, "train/4x12": 2}, {"train/8x8": 5}, {"train/4x12": 4}]
    alone = Order(shards, batch_size=4, seed=3, window=2)
    for facts in (of(0.3), of()):
        mixed = make_order((shards, ["only"] * 3, {"only": facts}), 4, seed=3)
        assert [mixed.batch(step) for step in range(40)] == [alone.batch(s) for s in range(40)]


def test_a_source_without_training_samples_is_refused() -> None:
    shards = [{"train/8x8": 7}, {"holdout/8x8": 5}]
    with pytest.raises(Refused, match="split 'train' of the source 'style'"):
        make_order((shards, ["subject", "style"], {"subject": of(), "style": of()}), 4)


def test_windows_of_all_sources_are_read_ahead() -> None:
    shards = [{"train/8x8": 4}] * 8
    sources = ["subject", "style"] * 4
    order = make_order((shards, sources, {"subject": of(), "style": of()}), 8)
    ahead = {shard for window in order.windows(0) for shard in order.shards(window)}
    assert {index.shard for step in range(2) for index in order.batch(step)} <= ahead
    assert Counter(sources[shard] for shard in ahead) == {"subject": 4, "style": 4}
