"""Batches whose rows have masks, pseudo-Huber's delta and prior targets."""

import dataclasses
from collections.abc import Callable, Collection

import numpy as np

from runtimes.contract import OPTIONAL, StepBatch

Batches = Callable[[int], StepBatch]


def of_rows(batch: Batches, which: Collection[str] = OPTIONAL) -> Batches:
    """The batches with arrays of OPTIONAL; in step 1 no row is prior, else every other."""

    def altered(step: int) -> StepBatch:
        plain = batch(step)
        draw = np.random.default_rng(step)
        count, _, height, width = plain.target.shape
        arrays = {
            "loss_mask": draw.random((count, height, width), np.float32),
            "huber_delta": draw.random(count, np.float32) + 0.1,
            "is_prior": (np.arange(count) % 2 == 0) & (step != 1),
        }
        return dataclasses.replace(plain, **{name: arrays[name] for name in which})

    return altered
