"""How a mesh of devices shares batches and arrays: the rules of runtimes that compile a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from runtimes.contract import WrongInput

#: All devices share a batch; those along `fsdp` share every array as well.
AXES = ("data", "fsdp")


def mesh_shape(count: int, fsdp: int | Literal["all"]) -> tuple[int, int]:
    """Shape of a mesh of `count` devices along AXES. Raises WrongInput if `fsdp` divides not."""
    if fsdp == "all":
        return 1, count
    if count % fsdp:
        raise WrongInput(f"train.fsdp {fsdp} does not divide {count} devices")
    return count // fsdp, fsdp


def cut(shape: Sequence[int], fsdp: int) -> tuple[str | None, ...]:
    """Along which axis each dimension of an array is cut: the largest that `fsdp` divides, if any,
    along `fsdp`."""
    axes: list[str | None] = [None] * len(shape)
    fitting = [(size, -n) for n, size in enumerate(shape) if size % fsdp == 0]
    if fsdp > 1 and fitting:
        axes[-max(fitting)[1]] = "fsdp"
    return tuple(axes)
