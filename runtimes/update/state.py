"""The groups of a State: those that a run publishes, and a check before a restore."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from numpy.typing import NDArray

from runtimes.contract import State, WrongInput

Group = TypeVar("Group")


def published(groups: Mapping[str, Group]) -> dict[str, Group]:
    """The group that a run publishes: the EMA, or else the weights."""
    name = "ema" if "ema" in groups else "weights"
    return {name: groups[name]}


def matched(
    state: State,
    groups: Mapping[str, Mapping[str, Any]],
    shard: Callable[[str, NDArray[Any]], Any] = lambda name, array: array,
) -> dict[str, dict[str, Any]]:
    """The arrays of a State, by group and name, for the tensors of `groups`.

    Args:
        state: full arrays.
        groups: group -> name -> tensor of any library, with a shape.
        shard: returns this process's shard of a full array.

    Raises:
        WrongInput: the State has other keys or shapes than `groups`.
    """
    found: dict[str, dict[str, Any]] = {}
    for group, tensors in groups.items():
        given = state.get(group, {})
        if given.keys() != tensors.keys():
            raise WrongInput(f"the checkpoint's {group} does not have this model's weights")
        found[group] = {name: shard(name, array) for name, array in given.items()}
        for name, tensor in tensors.items():
            if tuple(found[group][name].shape) != tuple(tensor.shape):
                raise WrongInput(f"the checkpoint's {group} has another shape for {name}")
    return found
