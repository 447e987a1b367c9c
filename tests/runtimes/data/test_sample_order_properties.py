"""For any shards, batch size, window, seed and number of ranks: the order of samples, the batches.

The position is a pure function of (seed, step, rank), so a run that resumes is a run that did not
stop.
"""

from collections import Counter
from dataclasses import fields

import numpy as np
from hypothesis import strategies as st
from property_tests import holds_for

from artifacts.latent_shards import LatentScale, open_latents
from runtimes.contract import StepBatch
from runtimes.data.loader import BatchReader, Loader, batch_number
from runtimes.data.sample_order import Order, SampleIndex
from runtimes.families import FAMILIES
from runtimes.objective.noise_schedule import NoiseSchedule
from runtimes.objective.training_objective import Objective

Groups = dict[str, int]
NAMES = st.sampled_from(["train/8x8", "train/4x12", "train/12x4", "holdout/8x8"])
SHARDS = st.lists(st.dictionaries(NAMES, st.integers(0, 9), max_size=4), min_size=1, max_size=5)
SOME = SHARDS.filter(lambda shards: any(n for s in shards for g, n in s.items() if g[0] == "t"))
ORDER = {
    "shards": SOME,
    "size": st.integers(1, 9),
    "window": st.integers(1, 4),
    "seed": st.integers(0, 2**63 - 1),
}
STEPS = st.integers(0, 60) | st.integers(0, 10**12)


def order(shards: list[Groups], size: int, window: int, seed: int) -> Order:
    return Order(shards, batch_size=size, window=window, seed=seed)


@holds_for(**ORDER, steps=st.lists(STEPS, min_size=1, max_size=6))
def test_a_step_is_the_same_whatever_was_read_before(
    shards: list[Groups], size: int, window: int, seed: int, steps: list[int]
) -> None:
    used = order(shards, size, window, seed)
    for step in steps:
        assert used.batch(step) == order(shards, size, window, seed).batch(step)


@holds_for(**ORDER)
def test_every_sample_comes_once_per_epoch_and_batches_have_one_bucket(
    shards: list[Groups], size: int, window: int, seed: int
) -> None:
    ours = order(shards, size, window, seed)
    streams: dict[str, list[SampleIndex]] = {}
    for step in range(ours.steps_before(size)):  # of `size` epochs, after which nothing is left
        batch = ours.batch(step)
        assert len(batch) == size and len({index.group for index in batch}) == 1
        streams.setdefault(batch[0].group, []).extend(batch)
    everything = {
        SampleIndex(number, group, row)
        for number, shard in enumerate(shards)
        for group, count in shard.items()
        if group.startswith("train/")
        for row in range(count)
    }
    seen = Counter(index for stream in streams.values() for index in stream)
    assert seen == Counter(dict.fromkeys(everything, size))
    for group, stream in streams.items():
        own = {index for index in everything if index.group == group}
        for start in range(0, len(stream), len(own)):
            assert set(stream[start : start + len(own)]) == own


@holds_for(**ORDER, drawn=st.integers(0, 2**32))
def test_rows_left_out_come_never_and_the_others_once_per_epoch(
    shards: list[Groups], size: int, window: int, seed: int, drawn: int
) -> None:
    rng = np.random.default_rng(drawn)
    rows = {
        SampleIndex(number, group, row): bool(rng.integers(2))
        for number, shard in enumerate(shards)
        for group, count in shard.items()
        if group.startswith("train/")
        for row in range(count)
    }
    if all(rows.values()):
        return
    left_out: list[dict[str, list[int]]] = [{} for _ in shards]
    for index, is_out in rows.items():
        if is_out:
            left_out[index.shard].setdefault(index.group, []).append(index.row)
    ours = Order(shards, batch_size=size, window=window, seed=seed, left_out=left_out)
    batches = (ours.batch(step) for step in range(ours.steps_before(size)))
    seen = Counter(index for batch in batches for index in batch)
    assert seen == {index: size for index, is_out in rows.items() if not is_out}


@holds_for(**ORDER, step=STEPS, world=st.integers(1, 6))
def test_ranks_partition_the_batch_in_order(
    shards: list[Groups], size: int, window: int, seed: int, step: int, world: int
) -> None:
    ours = order(shards, size, window, seed)
    parts = [order(shards, size, window, seed).batch(step, r, world) for r in range(world)]
    assert [index for part in parts for index in part] == ours.batch(step)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@holds_for(skipped=st.lists(st.integers(0, 40), unique=True), steps=st.integers(1, 50))
def test_skipped_batches_are_left_out_and_no_other(skipped: list[int], steps: int) -> None:
    numbers = [batch_number(step, skipped) for step in range(steps)]
    kept = [n for n in range(steps + len(skipped)) if n not in skipped]
    assert numbers == kept[:steps]


def loader(url: str, seed: int, rank: int = 0, world: int = 1) -> Loader:
    schedule = NoiseSchedule.from_config({"beta_schedule": "scaled_linear"})
    objective = Objective(schedule, LatentScale(0.5), seed=seed)
    reader = BatchReader(open_latents(url), FAMILIES["sdxl"], objective)
    return Loader(reader, batch_size=4, seed=seed, window=2, rank=rank, world=world)


@holds_for(15, seed=ORDER["seed"], start=st.integers(0, 30), world=st.sampled_from((1, 2, 4)))
def test_a_resumed_loader_gives_the_bytes_of_one_that_did_not_stop(
    latents_url: str, seed: int, start: int, world: int
) -> None:
    whole = loader(latents_url, seed)
    for step in range(start + 3):
        batch = whole.batch(step)
    resumed = [loader(latents_url, seed, rank, world).batch(start + 2) for rank in range(world)]
    for field in fields(StepBatch):
        ours = getattr(batch, field.name)
        parts = [getattr(part, field.name) for part in resumed]
        if isinstance(ours, np.ndarray):
            np.testing.assert_array_equal(np.concatenate(parts), ours)
        elif isinstance(ours, dict):
            for name, array in ours.items():
                joined = np.concatenate([part[name] for part in parts])
                np.testing.assert_array_equal(joined, array)
        else:
            assert parts == [ours] * world
