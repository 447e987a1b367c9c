"""Padding of batches to one size, so that a compiled program serves every batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtimes.contract import StepBatch


def round_up(count: int, devices: int) -> int:
    """`count` rounded up to a multiple of `devices`."""
    return -(-count // devices) * devices


def repeat_last(array: NDArray[Any], rows: int) -> NDArray[Any]:
    """An array [B, ...] padded to at least `rows` rows with copies of its last row."""
    return np.concatenate([array, np.repeat(array[-1:], max(0, rows - len(array)), axis=0)])


def pad_batch(batch: StepBatch, rows: int, devices: int) -> StepBatch:
    """A batch padded to at least `rows` samples, and to a multiple of `devices`.

    Copies of the last sample fill the batch; the caller must ignore their results.
    """
    rows = round_up(max(rows, len(batch.timesteps)), devices)
    names = ("noisy_latents", "timesteps", "target", "weight")
    conditioning = {name: repeat_last(array, rows) for name, array in batch.conditioning.items()}
    arrays: dict[str, Any] = {name: repeat_last(getattr(batch, name), rows) for name in names}
    return replace(batch, conditioning=conditioning, **arrays)
