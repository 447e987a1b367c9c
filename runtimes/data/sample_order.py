"""The order of samples: index arithmetic, a pure function of (seed, step).

Each bucket (image size) has an endless stream: its samples, shuffled anew in each epoch. Batch k of
a bucket has items [k B, (k + 1) B) of the stream, for batch size B. The remainder of an epoch thus
starts the next epoch's first batch, and each sample occurs once per epoch.

Epoch e contains floor((e + 1) n / B) - floor(e n / B) batches of a bucket with n samples. Hence the
number of steps before an epoch is a sum, and a resume at any step replays no earlier step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from configs.errors import Refused
from runtimes.objective.random_draws import Stream, generator


class SampleIndex(NamedTuple):
    """The location of a sample in a latents artifact."""

    shard: int  # number of the shard, from 0
    group: str  # `<split>/<h>x<w>`
    row: int  # in the group of the shard


class Window(NamedTuple):
    """Shards of a bucket that are shuffled together."""

    bucket: int
    epoch: int
    number: int  # in the epoch


class _Layout(NamedTuple):
    shards: NDArray[np.int64]  # the epoch's order of shards
    ends: NDArray[np.int64]  # samples up to the end of each, in that order
    window_ends: NDArray[np.int64]  # samples up to the end of each window


class Bucket:
    """The stream of one bucket: shuffled shards, then shuffled samples within windows of shards.

    All buckets have one order of shards, so that they need the same shards at about the same time.

    Memory: O(shards), and one permutation of the samples of a window.

    Args:
        number: index of the bucket, which selects its random numbers.
        counts: samples of the bucket in each shard.
        window: number of shards that are shuffled together.
        left_out: shard -> its rows that are in no batch.
    """

    def __init__(
        self,
        group: str,
        number: int,
        counts: Sequence[int],
        seed: int,
        window: int,
        left_out: Mapping[int, Iterable[int]] | None = None,
    ) -> None:
        self.group = group
        self.number = number
        self.seed = seed
        self.shards_per_window = window
        self.counts = np.array(counts, np.int64)  # samples of each shard that are in batches
        #: Shard -> for each row left out, in order, the number of rows before it that are not.
        self._kept_before: dict[int, NDArray[np.int64]] = {}
        for shard, rows in (left_out or {}).items():
            ordered = np.array(sorted(rows), np.int64)
            self._kept_before[shard] = ordered - np.arange(len(ordered))
            self.counts[shard] -= len(ordered)
        self.total = int(self.counts.sum())
        # Two entries, since a batch may span two windows or two epochs.
        self._layout = lru_cache(2)(self._draw_layout)
        self._permutation = lru_cache(2)(self._draw_permutation)

    def samples(self, start: int, count: int) -> list[SampleIndex]:
        """Items [start, start + count) of the stream."""
        return [self._sample(*divmod(item, self.total)) for item in range(start, start + count)]

    def window(self, start: int) -> Window:
        """The window of item `start` of the stream."""
        epoch, item = divmod(start, self.total)
        ends = self._layout(epoch).window_ends
        return Window(self.number, epoch, int(np.searchsorted(ends, item, side="right")))

    def shards(self, window: Window) -> list[int]:
        """The shards of a window, then those of the following window."""
        start = window.number * self.shards_per_window
        shards = self._layout(window.epoch).shards[start : start + 2 * self.shards_per_window]
        if len(shards) <= self.shards_per_window:
            following = self._layout(window.epoch + 1).shards[: self.shards_per_window]
            shards = np.append(shards, following)
        return list(map(int, shards))

    def _sample(self, epoch: int, item: int) -> SampleIndex:
        layout = self._layout(epoch)
        window = int(np.searchsorted(layout.window_ends, item, side="right"))
        begin = int(layout.window_ends[window - 1]) if window else 0
        size = int(layout.window_ends[window]) - begin
        item = begin + int(self._permutation(epoch, window, size)[item - begin])
        turn = int(np.searchsorted(layout.ends, item, side="right"))
        row = item - (int(layout.ends[turn - 1]) if turn else 0)
        shard = int(layout.shards[turn])
        if shard in self._kept_before:
            row += int(np.searchsorted(self._kept_before[shard], row, side="right"))
        return SampleIndex(shard, self.group, row)

    def _draw_layout(self, epoch: int) -> _Layout:
        shards = generator(self.seed, Stream.SHARDS, epoch, 0).permutation(len(self.counts))
        shards = shards[self.counts[shards] > 0]
        ends = np.cumsum(self.counts[shards])
        every = self.shards_per_window
        return _Layout(shards, ends, np.append(ends[every - 1 : -1 : every], ends[-1]))

    def _draw_permutation(self, epoch: int, window: int, size: int) -> NDArray[np.int64]:
        return generator(self.seed, Stream.WINDOW, epoch, self.number, window).permutation(size)


class Order:
    """The order of a training run's samples: those of the split `train`.

    Args:
        shards: for each shard, number of samples per group `<split>/<h>x<w>`.
        batch_size: global batch size.
        window: number of shards that are shuffled together.
        left_out: for each shard, group -> rows that are in no batch; without it, all are.

    Raises:
        Refused: the split `train` has no samples.
    """

    def __init__(
        self,
        shards: Sequence[Mapping[str, int]],
        *,
        batch_size: int,
        seed: int,
        window: int,
        left_out: Sequence[Mapping[str, Iterable[int]]] = (),
    ) -> None:
        groups = sorted({g for shard in shards for g in shard if g.startswith("train/")})
        buckets = []
        for number, group in enumerate(groups):
            counts = [shard.get(group, 0) for shard in shards]
            rows = {shard: rows[group] for shard, rows in enumerate(left_out) if group in rows}
            buckets.append(Bucket(group, number, counts, seed, window, rows))
        self.buckets = [bucket for bucket in buckets if bucket.total]
        if not self.buckets:
            raise Refused("the latents hold no sample of the split 'train': nothing to do")
        self.batch_size = batch_size
        self.seed = seed
        self._epoch_batches = lru_cache(2)(self._draw_epoch_batches)

    @property
    def total(self) -> int:
        """Samples per epoch."""
        return sum(bucket.total for bucket in self.buckets)

    def steps_before(self, epoch: int) -> int:
        """Number of steps before `epoch`."""
        return sum(epoch * bucket.total // self.batch_size for bucket in self.buckets)

    def epoch_of(self, step: int) -> int:
        """The epoch in which the batch of a step ends."""
        most = (step + len(self.buckets)) * self.batch_size // self.total + 1
        return bisect_right(range(most + 1), step, key=self.steps_before) - 1

    def batch(self, step: int, rank: int = 0, world: int = 1) -> list[SampleIndex]:
        """The rank's contiguous slice of the step's batch. All ranks' samples are of one bucket."""
        bucket, start = self._place(step)
        low, high = (r * self.batch_size // world for r in (rank, rank + 1))
        return bucket.samples(start + low, high - low)

    def window(self, step: int) -> Window:
        """The window of the first sample of the step's batch."""
        bucket, start = self._place(step)
        return bucket.window(start)

    def shards(self, window: Window) -> list[int]:
        """The shards of a window, then those of the bucket's next window."""
        (bucket,) = (bucket for bucket in self.buckets if bucket.number == window.bucket)
        return bucket.shards(window)

    def _place(self, step: int) -> tuple[Bucket, int]:
        """The bucket of a step's batch, and the batch's first item of the bucket's stream."""
        epoch = self.epoch_of(step)
        labels, turns = self._epoch_batches(epoch)
        position = step - self.steps_before(epoch)
        bucket = self.buckets[labels[position]]
        start = (epoch * bucket.total // self.batch_size + int(turns[position])) * self.batch_size
        return bucket, start

    def _draw_epoch_batches(self, epoch: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """For each batch of the epoch: its bucket, and its index among the bucket's batches."""
        counts = [
            (epoch + 1) * b.total // self.batch_size - epoch * b.total // self.batch_size
            for b in self.buckets
        ]
        labels = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        labels = generator(self.seed, Stream.BATCHES, epoch).permutation(labels)
        turns = np.empty_like(labels)
        for number, count in enumerate(counts):
            turns[labels == number] = np.arange(count)
        return labels, turns


def evenly_spaced(shards: Sequence[Mapping[str, int]], split: str, count: int) -> list[SampleIndex]:
    """At most `count` samples of a split, evenly spaced over all its samples, in order."""
    held = [
        (number, group, size)
        for number, shard in enumerate(shards)
        for group, size in sorted(shard.items())
        if group.startswith(f"{split}/") and size
    ]
    ends = np.cumsum([size for _, _, size in held])
    total = int(ends[-1]) if held else 0
    selected = min(count, total)
    samples = []
    for item in (k * total // selected for k in range(selected)):
        turn = int(np.searchsorted(ends, item, side="right"))
        number, group, size = held[turn]
        samples.append(SampleIndex(number, group, item - (int(ends[turn]) - size)))
    return samples
