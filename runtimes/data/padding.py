"""Pad batches to a fixed number of rows, so that one compiled program serves every batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtimes.contract import StepBatch

#: Captions of varying length are padded to a multiple of this number of tokens.
TOKEN_STEP = 32


def padded_rows(count: int, devices: int) -> int:
    """The smallest multiple of `devices` that is at least `count`."""
    return -(-count // devices) * devices


def pad_rows(array: NDArray[Any], rows: int) -> NDArray[Any]:
    """Repeat the last row of an array [B, ...] until it has `rows` rows.

    An array that already has `rows` rows or more is copied unchanged.
    """
    return np.concatenate([array, np.repeat(array[-1:], max(0, rows - len(array)), axis=0)])


def pad_batch(batch: StepBatch, rows: int, devices: int) -> StepBatch:
    """Repeat the last sample of a batch until every device has the same number of rows.

    Args:
        rows: least number of rows of the padded batch.
        devices: devices that share the rows; the padded number is a multiple of it.
    """
    rows = padded_rows(max(rows, len(batch.timesteps)), devices)
    names = ("noisy_latents", "timesteps", "target", "weight")
    conditioning = {name: pad_rows(array, rows) for name, array in batch.conditioning.items()}
    arrays: dict[str, Any] = {name: pad_rows(getattr(batch, name), rows) for name in names}
    return replace(batch, conditioning=conditioning, **arrays)
