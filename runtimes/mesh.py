"""How a mesh of devices shares batches and arrays, and how what it computes keeps to one size: the
rules of runtimes that compile the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtimes.base import StepBatch, WrongInput

#: All devices share a batch; those along `fsdp` share every array as well.
AXES = ("data", "fsdp")


def mesh_shape(count: int, fsdp: int) -> tuple[int, int]:
    """Of so many devices, along AXES. Raises WrongInput if `fsdp` does not divide them."""
    if count % fsdp:
        raise WrongInput(f"train.mesh.fsdp {fsdp} does not divide {count} devices")
    return count // fsdp, fsdp


def cut(shape: Sequence[int], fsdp: int) -> tuple[str | None, ...]:
    """Along which axis each dimension of an array is cut: the largest that `fsdp` divides, if any,
    along `fsdp`."""
    axes: list[str | None] = [None] * len(shape)
    fitting = [(size, -n) for n, size in enumerate(shape) if size % fsdp == 0]
    if fsdp > 1 and fitting:
        axes[-max(fitting)[1]] = "fsdp"
    return tuple(axes)


def filled_up(count: int, devices: int) -> int:
    """So many rows, or as few more as give each device as many."""
    return -(-count // devices) * devices


def repeat_last(array: NDArray[Any], rows: int) -> NDArray[Any]:
    """An array [B, ...] with its last row repeated, up to `rows`: what is of one size is one
    program."""
    return np.concatenate([array, np.repeat(array[-1:], max(0, rows - len(array)), axis=0)])


def filled(batch: StepBatch, rows: int, devices: int) -> StepBatch:
    """A batch of at most `rows` samples with the last one repeated, up to as many for each
    device."""
    rows = filled_up(max(rows, len(batch.timesteps)), devices)
    names = ("noisy_latents", "timesteps", "target", "weight")
    conditioning = {name: repeat_last(array, rows) for name, array in batch.conditioning.items()}
    arrays: dict[str, Any] = {name: repeat_last(getattr(batch, name), rows) for name in names}
    return replace(batch, conditioning=conditioning, **arrays)
