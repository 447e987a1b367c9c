"""Copy a rank's part of the State to the host, and read a saved State in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtimes.contract import Owners, SavedState, State, StateShapes, WrongInput

#: Threads that read arrays of a saved state, and bytes that they may be ahead of the restore.
READERS = 8
AHEAD = 2**29
Rows = Callable[[str, tuple[int, ...]], Any]  # (name, shape) -> index of the needed rows


def shapes_of(groups: Mapping[str, Mapping[str, Any]]) -> StateShapes:
    """Shapes of arrays or tensors, by group and name."""
    return {
        group: {name: tuple(array.shape) for name, array in arrays.items()}
        for group, arrays in groups.items()
    }


def published(shapes: StateShapes) -> Owners:
    """Rank 0 as the owner of what a run publishes: the EMA, or else the weights; and constants."""
    groups = {"ema" if "ema" in shapes else "weights", "constants"}
    return {group: dict.fromkeys(names, 0) for group, names in shapes.items() if group in groups}


def owned_copies(
    groups: Mapping[str, Mapping[str, Any]],
    owners: Owners | None,
    rank: int,
    copy: Callable[[Any], NDArray[np.float32]],
    gather: Callable[[str, Any], Any] = lambda name, tensor: tensor,
) -> State:
    """Host copies of the arrays that a rank owns.

    Args:
        groups: group -> name -> tensor of any library.
        owners: as in Runtime.state.
        rank: of this process.
        copy: returns a host copy of a full array.
        gather: returns the full array on the devices; collective if arrays are sharded.
    """
    state: State = {}
    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            owner = 0 if owners is None else owners.get(group, {}).get(name)
            if owner is None:
                continue
            if owner == rank:
                state.setdefault(group, {})[name] = copy(gather(name, tensor))
            else:
                gather(name, tensor)
    return state


def read_state_arrays(
    state: SavedState, shapes: StateShapes, rows: Rows = lambda name, shape: ...
) -> Iterator[tuple[str, str, NDArray[np.float32]]]:
    """Read a saved state for arrays of `shapes`, as (group, name, rows).

    Threads read ahead, at most `AHEAD` bytes or one array.

    Args:
        shapes: of the full arrays of this model.
        rows: index of the rows that this process needs.

    Raises:
        WrongInput: the state has other names or shapes.
    """
    _check(state, shapes)
    pending: deque[tuple[str, str, int, Future[Any]]] = deque()
    ahead = 0
    with ThreadPoolExecutor(READERS, thread_name_prefix="restore") as pool:
        for group in shapes:
            for name, stored in state[group].items():
                size = 4 * prod(stored.shape)
                while pending and ahead + size > AHEAD:
                    ahead -= pending[0][2]
                    yield _first(pending)
                future = pool.submit(stored.__getitem__, rows(name, stored.shape))
                pending.append((group, name, size, future))
                ahead += size
        while pending:
            yield _first(pending)


def _first(
    pending: deque[tuple[str, str, int, Future[Any]]],
) -> tuple[str, str, NDArray[np.float32]]:
    group, name, _, future = pending.popleft()
    return group, name, np.asarray(future.result())


def _check(state: SavedState, shapes: StateShapes) -> None:
    for group, expected in shapes.items():
        saved = state.get(group, {})
        if saved.keys() != expected.keys():
            raise WrongInput(f"the stored {group} does not have this model's weights")
        for name, shape in expected.items():
            if tuple(saved[name].shape) != shape:
                raise WrongInput(f"the stored {group} has another shape for {name}")
