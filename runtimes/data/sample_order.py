"""The order of samples: index arithmetic, a pure function of (seed, step).

Each source has an endless stream in each bucket (image size): its samples, shuffled anew in each of
its passes. A bucket mixes the streams of its sources: before epoch e it has had floor(e c) samples
of a source with c samples per epoch, shared over the source's buckets in proportion. Within an
epoch, sources alternate as evenly as their counts allow. Latents without sources are one source,
with all its samples in each epoch.

Batch k of a bucket has items [k B, (k + 1) B) of the mixed stream, for batch size B. The remainder
of an epoch thus starts the next epoch's first batch. If s(e) items of a bucket precede epoch e, it
contains floor(s(e + 1) / B) - floor(s(e) / B) of the bucket's batches. Hence the number of steps
before an epoch is a sum, and a resume at any step replays no earlier step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from configs.errors import Refused
from configs.settings.sources import samples_per_epoch
from runtimes.objective.random_draws import Stream, generator

#: Source -> its facts, as TrainJob.mixture.
Mixture = Mapping[str, Mapping[str, Any]]


class SampleIndex(NamedTuple):
    """The location of a sample in a latents artifact."""

    shard: int  # number of the shard, from 0
    group: str  # `<split>/<h>x<w>`
    row: int  # in the group of the shard


class Window(NamedTuple):
    """Shards of a stream that are shuffled together."""

    stream: int  # SourceStream.number
    turn: int  # the source's pass
    number: int  # in the pass


class _Layout(NamedTuple):
    shards: NDArray[np.int64]  # the pass's order of shards
    ends: NDArray[np.int64]  # samples up to the end of each, in that order
    window_ends: NDArray[np.int64]  # samples up to the end of each window


class SourceStream:
    """A source's stream in a bucket: shuffled shards, then shuffled samples in windows of shards.

    All streams of a source have one order of shards, so that they need the same shards at about the
    same time.

    Memory: O(shards), and one permutation of the samples of a window.

    Args:
        number: unique, selects the stream's random numbers.
        counts: samples of the bucket in each shard of the source.
        window: number of shards that are shuffled together.
        left_out: shard -> its rows that are in no batch.
        shards: numbers of the source's shards among all; without them, `counts` has all shards.
        source: number of the source, which selects the order of shards.
    """

    def __init__(
        self,
        group: str,
        number: int,
        counts: Sequence[int],
        seed: int,
        window: int,
        left_out: Mapping[int, Iterable[int]] | None = None,
        *,
        shards: Sequence[int] | None = None,
        source: int = 0,
    ) -> None:
        self.group = group
        self.number = number
        self.seed = seed
        self.shards_per_window = window
        self._source = source
        self._numbers = np.arange(len(counts)) if shards is None else np.array(shards, np.int64)
        self.counts = np.array(counts, np.int64)  # samples of each shard that are in batches
        #: Shard -> for each row left out, in order, the number of rows before it that are not.
        self._kept_before: dict[int, NDArray[np.int64]] = {}
        for shard, rows in (left_out or {}).items():
            ordered = np.array(sorted(rows), np.int64)
            self._kept_before[shard] = ordered - np.arange(len(ordered))
            self.counts[np.searchsorted(self._numbers, shard)] -= len(ordered)
        self.total = int(self.counts.sum())
        # Two entries, since a batch may span two windows or two passes.
        self._layout = lru_cache(2)(self._draw_layout)
        self._permutation = lru_cache(2)(self._draw_permutation)

    def sample(self, item: int) -> SampleIndex:
        """Item `item` of the stream."""
        turn, item = divmod(item, self.total)
        layout = self._layout(turn)
        window = int(np.searchsorted(layout.window_ends, item, side="right"))
        begin = int(layout.window_ends[window - 1]) if window else 0
        size = int(layout.window_ends[window]) - begin
        item = begin + int(self._permutation(turn, window, size)[item - begin])
        place = int(np.searchsorted(layout.ends, item, side="right"))
        row = item - (int(layout.ends[place - 1]) if place else 0)
        shard = int(self._numbers[layout.shards[place]])
        if shard in self._kept_before:
            row += int(np.searchsorted(self._kept_before[shard], row, side="right"))
        return SampleIndex(shard, self.group, row)

    def window(self, item: int) -> Window:
        """The window of an item of the stream."""
        turn, item = divmod(item, self.total)
        ends = self._layout(turn).window_ends
        return Window(self.number, turn, int(np.searchsorted(ends, item, side="right")))

    def shards(self, window: Window) -> list[int]:
        """The shards of a window, then those of the following window."""
        start = window.number * self.shards_per_window
        shards = self._layout(window.turn).shards[start : start + 2 * self.shards_per_window]
        if len(shards) <= self.shards_per_window:
            following = self._layout(window.turn + 1).shards[: self.shards_per_window]
            shards = np.append(shards, following)
        return list(map(int, self._numbers[shards]))

    def _draw_layout(self, turn: int) -> _Layout:
        rng = generator(self.seed, Stream.SHARDS, turn, self._source)
        shards = rng.permutation(len(self.counts))
        shards = shards[self.counts[shards] > 0]
        ends = np.cumsum(self.counts[shards])
        every = self.shards_per_window
        return _Layout(shards, ends, np.append(ends[every - 1 : -1 : every], ends[-1]))

    def _draw_permutation(self, turn: int, window: int, size: int) -> NDArray[np.int64]:
        return generator(self.seed, Stream.WINDOW, turn, self.number, window).permutation(size)


def split(count: int, sizes: Sequence[int]) -> list[int]:
    """Share `count` items in proportion to `sizes`, where `count <= sum(sizes)`.

    With each further item, one part grows by one. All of `sum(sizes)` items are shared as `sizes`.
    The parts of k sizes are within (1 + H) / 2 of their proportion, H = 1 + 1/2 + ... + 1/(k - 1).
    """
    parts = [0] * len(sizes)
    rest = sum(sizes)
    for place in largest_first(sizes):
        parts[place] = _rounded(count * sizes[place], rest)
        count -= parts[place]
        rest -= sizes[place]
    return parts


def part_of(item: int, sizes: Sequence[int], order: Sequence[int]) -> tuple[int, int]:
    """The part of `split` that grows with item number `item` (from 0), and its size before.

    Args:
        order: `largest_first(sizes)`.
    """
    rest = sum(sizes)
    for place in order[:-1]:
        size = sizes[place]
        before = _rounded(item * size, rest)
        if _rounded((item + 1) * size, rest) > before:
            return place, before
        item -= before
        rest -= size
    return order[-1], item


def largest_first(sizes: Sequence[int]) -> list[int]:
    """The places of sizes above 0, in the order that shares them with the least error."""
    return sorted((n for n, size in enumerate(sizes) if size), key=lambda n: -sizes[n])


def _rounded(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)


class Order:
    """The order of a training run's samples: those of the split `train`.

    Args:
        shards: for each shard, number of samples per group `<split>/<h>x<w>`.
        batch_size: global batch size.
        window: number of shards that are shuffled together.
        left_out: for each shard, group -> rows that are in no batch; without it, all are.
        sources: for each shard, the name of its source in the mixture.
        mixture: facts of each source; None: all shards are of one source.

    Attributes:
        buckets: for each bucket with samples, the stream of each source.
        per_epoch: samples per epoch of each source.

    Raises:
        Refused: the split `train` has no samples, or none of a source.
    """

    def __init__(
        self,
        shards: Sequence[Mapping[str, int]],
        *,
        batch_size: int,
        seed: int,
        window: int,
        left_out: Sequence[Mapping[str, Iterable[int]]] = (),
        sources: Sequence[str] = (),
        mixture: Mixture | None = None,
    ) -> None:
        if mixture is None:
            mixture = {"": {"weight": None, "repeats": None, "regularisation": None}}
            sources = [""] * len(shards)
        names = sorted(mixture)
        groups = sorted({g for shard in shards for g in shard if g.startswith("train/")})
        buckets: list[list[SourceStream]] = [[] for _ in groups]
        for source, name in enumerate(names):
            own = [shard for shard, of in enumerate(sources) if of == name]
            for number, group in enumerate(groups):
                rows = {n: left_out[n][group] for n in own if left_out and group in left_out[n]}
                stream = SourceStream(
                    group,
                    source * len(groups) + number,
                    [shards[shard].get(group, 0) for shard in own],
                    seed,
                    window,
                    rows,
                    shards=own,
                    source=source,
                )
                buckets[number].append(stream)
        self.buckets = [streams for streams in buckets if any(s.total for s in streams)]
        #: For each source, its samples in each bucket.
        self._totals = [
            [streams[source].total for streams in self.buckets] for source in range(len(names))
        ]
        for name, totals in zip(names, self._totals, strict=True):
            if not sum(totals):
                of = f" of the source {name!r}" if name else ""
                raise Refused(f"the latents hold no sample of the split 'train'{of}: nothing to do")
        counts = dict(zip(names, map(sum, self._totals), strict=True))
        self.per_epoch = samples_per_epoch(mixture, counts)
        self._rates = [self.per_epoch[name].as_integer_ratio() for name in names]
        self.batch_size = batch_size
        self.seed = seed
        self._before = lru_cache(4)(self._count_before)
        self._epoch_batches = lru_cache(2)(self._draw_epoch_batches)

    @property
    def total(self) -> int:
        """Samples per epoch, without a fraction."""
        return int(sum(self.per_epoch.values()))

    def steps_before(self, epoch: int) -> int:
        """Number of steps before `epoch`."""
        return sum(sum(counts) // self.batch_size for counts in self._before(epoch))

    def epoch_of(self, step: int) -> int:
        """The epoch in which the batch of a step ends."""
        # Batches and sources round items down: each holds back less than a batch, or an item.
        total = sum(self.per_epoch.values())
        least = int(step * self.batch_size // total)
        items = (step + len(self.buckets) + 1) * self.batch_size + len(self.per_epoch)
        epochs = range(least, int(items // total) + 2)
        return least + bisect_right(epochs, step, key=self.steps_before) - 1

    def batch(self, step: int, rank: int = 0, world: int = 1) -> list[SampleIndex]:
        """The rank's contiguous slice of the step's batch. All ranks' samples are of one bucket."""
        bucket, start, epoch = self._place(step)
        low, high = (r * self.batch_size // world for r in (rank, rank + 1))
        return self._samples(bucket, start + low, high - low, epoch)

    def windows(self, step: int) -> list[Window]:
        """The window of each source's next sample at the start of the step's batch."""
        bucket, start, latest = self._place(step)
        epoch = self._epoch_of_item(bucket, start, latest)
        before, counts, item = self._position(bucket, epoch, start)
        items = [b + n for b, n in zip(before, split(item, counts), strict=True)]
        streams = self.buckets[bucket]
        return [s.window(n) for s, n in zip(streams, items, strict=True) if s.total]

    def shards(self, window: Window) -> list[int]:
        """The shards of a window, then those of the stream's next window."""
        streams = (stream for bucket in self.buckets for stream in bucket)
        (stream,) = (stream for stream in streams if stream.number == window.stream)
        return stream.shards(window)

    def _place(self, step: int) -> tuple[int, int, int]:
        """The bucket of a step's batch, its first item in the mixed stream, its last epoch."""
        epoch = self.epoch_of(step)
        labels, turns = self._epoch_batches(epoch)
        position = step - self.steps_before(epoch)
        bucket = int(labels[position])
        first = sum(self._before(epoch)[bucket]) // self.batch_size
        start = (first + int(turns[position])) * self.batch_size
        return bucket, start, epoch

    def _epoch_of_item(self, bucket: int, item: int, latest: int) -> int:
        """The epoch of an item of a bucket's mixed stream, `latest` or before."""

        def first(epoch: int) -> int:
            return sum(self._before(epoch)[bucket])

        if first(latest) <= item:
            return latest
        return bisect_right(range(latest), item, key=first) - 1

    def _samples(self, bucket: int, start: int, count: int, latest: int) -> list[SampleIndex]:
        """Items [start, start + count) of a bucket's mixed stream, `latest` its last epoch."""
        streams = self.buckets[bucket]
        epoch = self._epoch_of_item(bucket, start, latest)
        samples: list[SampleIndex] = []
        while len(samples) < count:
            before, counts, item = self._position(bucket, epoch, start + len(samples))
            end = min(sum(counts), item + count - len(samples))
            order = largest_first(counts)
            for number in range(item, end):
                source, taken = part_of(number, counts, order)
                samples.append(streams[source].sample(before[source] + taken))
            epoch += 1
        return samples

    def _position(self, bucket: int, epoch: int, item: int) -> tuple[list[int], list[int], int]:
        """Each source's samples before an epoch of a bucket, those in it, and the item's number."""
        before = self._before(epoch)[bucket]
        after = self._before(epoch + 1)[bucket]
        return before, [b - a for a, b in zip(before, after, strict=True)], item - sum(before)

    def _count_before(self, epoch: int) -> list[list[int]]:
        """For each bucket, the samples of each source before an epoch."""
        by_source = []
        for (samples, epochs), totals in zip(self._rates, self._totals, strict=True):
            turns, rest = divmod(epoch * samples // epochs, sum(totals))
            parts = split(rest, totals)
            by_source.append([turns * n + part for n, part in zip(totals, parts, strict=True)])
        return [list(counts) for counts in zip(*by_source, strict=True)]

    def _draw_epoch_batches(self, epoch: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """For each batch of the epoch: its bucket, and its index among the bucket's batches."""
        first, last = (
            [sum(counts) // self.batch_size for counts in self._before(e)]
            for e in (epoch, epoch + 1)
        )
        counts = [b - a for a, b in zip(first, last, strict=True)]
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
