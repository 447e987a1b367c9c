"""Stack a batch into micro-batches of one size, as inputs of the compiled step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from runtimes.contract import UNCAST, StepBatch
from runtimes.data.padding import pad_batch
from runtimes.jax.mesh import Mesh

Stacked = dict[str, Any]


def stack_micro_batches(batch: StepBatch, size: int | None, mesh: Mesh, dtype: Any) -> Stacked:
    """Stack this process's batch into n micro-batches of B rows, padded with rows of weight 0.

    Args:
        batch: this process's share of the global batch.
        size: samples per micro-batch; None is the whole batch.
        mesh: B is a multiple of its local device count.
        dtype: of latents and of all conditioning that is not in contract.UNCAST.

    Returns:
        noisy_latents: [n, B, C, h, w] `dtype`.
        timesteps: [n, B].
        target: [n, B, C, h, w] f32.
        weight: [n, B] f32.
        conditioning: keyword to [n, B, ...].
    """
    count = len(batch.timesteps)
    size = min(size or count, count)
    parts = -(-count // size)
    rows = mesh.padded_rows(size)
    # Sample index of each row. Padding rows repeat sample 0.
    places = np.zeros((parts, rows), np.int64)
    weight = np.zeros((parts, rows), np.float32)
    for part in range(parts):
        taken = np.arange(part * size, min((part + 1) * size, count))
        places[part, : len(taken)], weight[part, : len(taken)] = taken, batch.weight[taken]
    conditioning = {
        name: array[places] if name in UNCAST else array[places].astype(dtype)
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
    """Copy stacked micro-batches to the devices, their rows sharded over all devices."""
    return dict(jax.tree.map(lambda array: mesh.shard_rows(array, axis=1), stacked))


def held_out_errors(
    errors: Callable[..., Array], arrays: Any, batch: StepBatch, rows: int, mesh: Mesh, dtype: Any
) -> NDArray[np.float32]:
    """Mean squared error per sample [B] f32 of a batch that every process has.

    Args:
        errors: compiled `step.errors` of a network.
        arrays: the network's, by their names in it.
        batch: with at most `rows` samples.
        rows: number of rows to which every batch is padded, to run one program.
        mesh: devices that share the rows.
        dtype: of latents and conditioning.
    """
    padded = pad_batch(batch, rows, mesh.count)
    stacked = stack_micro_batches(padded, None, mesh, dtype)
    micro = jax.tree.map(lambda array: mesh.shard_global_rows(array[0]), stacked)
    return mesh.fetch(errors(arrays, jnp.uint32(0), micro))[: len(batch.timesteps)]
