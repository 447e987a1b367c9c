"""Batches padded to one size, so that a program compiled once serves each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtimes.contract import StepBatch


def round_up(count: int, devices: int) -> int:
    """So many rows, or as few more as give each device as many."""
    return -(-count // devices) * devices


def repeat_last(array: NDArray[Any], rows: int) -> NDArray[Any]:
    """An array [B, ...] with its last row repeated, up to `rows`: what is of one size is one
    program."""
    return np.concatenate([array, np.repeat(array[-1:], max(0, rows - len(array)), axis=0)])


def pad_batch(batch: StepBatch, rows: int, devices: int) -> StepBatch:
    """A batch of at most `rows` samples with the last one repeated, up to as many for each
    device."""
    rows = round_up(max(rows, len(batch.timesteps)), devices)
    names = ("noisy_latents", "timesteps", "target", "weight")
    conditioning = {name: repeat_last(array, rows) for name, array in batch.conditioning.items()}
    arrays: dict[str, Any] = {name: repeat_last(getattr(batch, name), rows) for name in names}
    return replace(batch, conditioning=conditioning, **arrays)
