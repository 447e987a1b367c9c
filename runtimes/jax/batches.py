"""A batch as the compiled step takes it: micro-batches of one size, one below the other."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from runtimes.base import StepBatch
from runtimes.jax.mesh import Mesh
from runtimes.torch.inputs import EXACT

Stacked = dict[str, Any]


def stack(batch: StepBatch, size: int | None, mesh: Mesh, dtype: Any) -> Stacked:
    """Arrays [n, B, ...] of n micro-batches, with `weight` 0 for rows that only fill them up.

    Args:
        size: samples of this process in a micro-batch; None is all of it.
        dtype: of latents and conditioning.
    """
    count = len(batch.timesteps)
    size = min(size or count, count)
    parts = -(-count // size)
    rows = mesh.padded(size)
    # Where a sample goes: micro-batches are filled in order, what is left over repeats the first.
    places = np.zeros((parts, rows), np.int64)
    weight = np.zeros((parts, rows), np.float32)
    for part in range(parts):
        taken = np.arange(part * size, min((part + 1) * size, count))
        places[part, : len(taken)], weight[part, : len(taken)] = taken, batch.weight[taken]
    conditioning = {
        name: array[places] if name in EXACT else array[places].astype(dtype)
        for name, array in batch.conditioning.items()
    }
    return {
        "noisy_latents": batch.noisy_latents[places].astype(dtype),
        "timesteps": batch.timesteps[places],
        "target": batch.target[places],
        "weight": weight,
        "conditioning": conditioning,
    }


def put(stacked: Stacked, mesh: Mesh) -> Stacked:
    """On the devices, which share the rows of each micro-batch."""
    return dict(jax.tree.map(lambda array: mesh.put_rows(array, axis=1), stacked))


def one(batch: StepBatch, mesh: Mesh, dtype: Any) -> Stacked:
    """All of a batch as one micro-batch [B, ...], on the devices."""
    stacked = stack(batch, None, mesh, dtype)
    return dict(jax.tree.map(lambda array: mesh.put_rows(array[0]), stacked))
