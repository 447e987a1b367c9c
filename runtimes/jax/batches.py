"""A batch as the compiled step takes it: micro-batches of one size, one below the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from runtimes.contract import EXACT, StepBatch
from runtimes.data.padding import pad_batch
from runtimes.jax.mesh import Mesh

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
    rows = mesh.padded_rows(size)
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


def shard_stacked(stacked: Stacked, mesh: Mesh) -> Stacked:
    """On the devices, which share the rows of each micro-batch."""
    return dict(jax.tree.map(lambda array: mesh.shard_rows(array, axis=1), stacked))


def held_out_errors(
    errors: Callable[..., Array], arrays: Any, batch: StepBatch, rows: int, mesh: Mesh, dtype: Any
) -> NDArray[np.float32]:
    """The mean squared error of each sample [B] of a batch that every process has.

    Args:
        errors: step.errors of a network, compiled.
        rows: samples that a batch has at most; it is filled up to as many, to be one program.
    """
    whole = pad_batch(batch, rows, mesh.count)
    stacked = stack(whole, None, mesh, dtype)
    micro = jax.tree.map(lambda array: mesh.shard_global_rows(array[0]), stacked)
    return mesh.fetch(errors(arrays, jnp.uint32(0), micro))[: len(batch.timesteps)]
