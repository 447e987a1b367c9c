"""The held-out split: batches with noise that never changes, and the losses on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from artifacts.latents import Latents
from runtimes.contract import StepBatch, WrongInput
from runtimes.data.loader import BatchReader
from runtimes.data.order import evenly_spaced
from runtimes.families import Family
from runtimes.families.unet_inputs import NO_EXTRA_INPUTS, ExtraInputs
from runtimes.objective.objective import Objective


class Holdout:
    """Held-out samples, `draws` times each with noise fixed by the objective's seed.

    Raises:
        WrongInput: nothing was held out.
    """

    def __init__(
        self,
        latents: Latents,
        family: Family,
        objective: Objective,
        *,
        samples: int,
        draws: int,
        batch_size: int,
        text_encoders: bool = False,
        extras: ExtraInputs = NO_EXTRA_INPUTS,
        cache_bytes: int = 20 * 2**30,
    ) -> None:
        self._places = evenly_spaced([ref.groups for ref in latents.shards], "holdout", samples)
        if not self._places:
            raise WrongInput("the latents have no held-out samples: raise encode.holdout")
        self._draws, self._batch_size = draws, batch_size
        self._reader = BatchReader(
            latents,
            family,
            objective,
            text_encoders=text_encoders,
            extras=extras,
            cache_bytes=cache_bytes,
        )

    def batches(self) -> Iterator[tuple[list[int], StepBatch]]:
        """For each batch, the number (from 0) of every sample in it, and the batch."""
        numbered = sorted(enumerate(self._places), key=lambda item: item[1].group)
        for _, bucket in groupby(numbered, key=lambda item: item[1].group):
            drawn = [(number, place, d) for number, place in bucket for d in range(self._draws)]
            for start in range(0, len(drawn), self._batch_size):
                part = drawn[start : start + self._batch_size]
                counters = [number * self._draws + draw for number, _, draw in part]
                numbers = [number for number, _, _ in part]
                places = [place for _, place, _ in part]
                yield numbers, self._reader.batch(0, places, counters, len(part))

    def __enter__(self) -> Holdout:
        return self

    def __exit__(self, *_: object) -> None:
        """Unmap the shards."""
        self._reader.close()


def sample_losses(
    holdout: Holdout,
    errors: Callable[[StepBatch], NDArray[np.float32]],
    stopping: Callable[[], bool] = lambda: False,
) -> list[float] | None:
    """Each held-out sample's loss, averaged over its draws; None if it was to stop before.

    Args:
        errors: the mean squared error of each sample of a batch [B].
    """
    found: dict[int, list[float]] = {}
    for numbers, batch in holdout.batches():
        if stopping():
            return None
        for number, error in zip(numbers, errors(batch).tolist(), strict=True):
            found.setdefault(number, []).append(error)
    return [math.fsum(found[n]) / len(found[n]) for n in sorted(found)]
