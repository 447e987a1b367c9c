"""The held-out split: batches with fixed noise, and the losses of each sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from runtimes.contract import StepBatch, WrongInput
from runtimes.data.bucketed_sample_order import evenly_spaced
from runtimes.data.loader import BatchReader


class Holdout:
    """Batches of held-out samples, each sample with `draws` fixed draws of noise and timestep.

    The seed of the reader's objective determines the noise, so every run measures the same batches.

    Args:
        reader: closed with this object.
        samples: maximum number of held-out samples, evenly spaced over the shards.
        draws: noise draws per sample.
        batch_size: maximum samples per batch.

    Raises:
        WrongInput: the latents have no held-out samples.
    """

    def __init__(
        self,
        reader: BatchReader,
        *,
        samples: int,
        draws: int,
        batch_size: int,
    ) -> None:
        self._samples = evenly_spaced(reader.groups, "holdout", samples)
        if not self._samples:
            raise WrongInput("the latents have no held-out samples: raise encode.holdout")
        self._draws = draws
        self._batch_size = batch_size
        self._reader = reader

    def batches(self) -> Iterator[tuple[list[int], StepBatch]]:
        """Yield (numbers, batch); `numbers` has the held-out sample (from 0) of each row."""
        numbered = sorted(enumerate(self._samples), key=lambda item: item[1].group)
        for _, bucket in groupby(numbered, key=lambda item: item[1].group):
            rows = [(number, sample, d) for number, sample in bucket for d in range(self._draws)]
            for start in range(0, len(rows), self._batch_size):
                chunk = rows[start : start + self._batch_size]
                counters = [number * self._draws + draw for number, _, draw in chunk]
                numbers = [number for number, _, _ in chunk]
                samples = [sample for _, sample, _ in chunk]
                yield numbers, self._reader.batch(0, samples, counters, len(chunk))

    def __enter__(self) -> Holdout:
        return self

    def __exit__(self, *_: object) -> None:
        """Unmap the shards."""
        self._reader.close()


def draw_losses(
    holdout: Holdout,
    errors: Callable[[StepBatch], NDArray[np.float32]],
    stopping: Callable[[], bool] = lambda: False,
) -> list[list[float]] | None:
    """The losses of each held-out sample, one per draw; None if `stopping` returned True.

    Args:
        errors: returns the mean squared error per sample [B] f32 of a batch.
        stopping: polled before each batch.
    """
    found: dict[int, list[float]] = {}
    for numbers, batch in holdout.batches():
        if stopping():
            return None
        for number, error in zip(numbers, errors(batch).tolist(), strict=True):
            found.setdefault(number, []).append(error)
    return [found[n] for n in sorted(found)]
