"""Sharding rules of batches and arrays on a device mesh, for runtimes that compile a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from runtimes.contract import WrongInput

#: Batches are sharded over both axes, parameters and optimizer state over `fsdp` only.
AXES = ("data", "fsdp")


def mesh_shape(count: int, fsdp: int | Literal["all"]) -> tuple[int, int]:
    """Shape (data, fsdp) of a mesh of `count` devices.

    Raises:
        WrongInput: `fsdp` does not divide `count`.
    """
    if fsdp == "all":
        return 1, count
    if count % fsdp:
        raise WrongInput(f"train.fsdp {fsdp} does not divide {count} devices")
    return count // fsdp, fsdp


def shard_axes(shape: Sequence[int], fsdp: int) -> tuple[str | None, ...]:
    """Mesh axis of each dimension of an array, as a PartitionSpec; None is not sharded.

    The largest dimension that `fsdp` divides is sharded, or the first of equally large ones. An
    array without such a dimension is replicated.
    """
    axes: list[str | None] = [None] * len(shape)
    divisible = [dim for dim, size in enumerate(shape) if size % fsdp == 0]
    if fsdp > 1 and divisible:
        axes[max(divisible, key=shape.__getitem__)] = "fsdp"
    return tuple(axes)
