"""Parts that the optimizer steps of all runtimes share: scalars, EMA and copies of the State.

A swap gives a network the EMA of its weights, for held-out losses and samples. Scalars of a step
are Adam's bias corrections, the EMA's decay and the text encoders' rates. A rank copies its part of
the State to the host, and reads a saved State in bounded memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.errors import Refused
from configs.settings.train import Train
from runtimes.contract import Owners, SavedState, State, StateShapes, WeightsLost


@contextmanager
def swapped(swap: Callable[[], None], restore: Callable[[], None]) -> Iterator[None]:
    """Within the context, the network has its EMA weights.

    Args:
        swap: assigns the EMA to the network.
        restore: assigns the trained weights again, exactly.

    Raises:
        WeightsLost: `swap` or `restore` failed.
    """
    _or_lost(swap)
    try:
        yield
    finally:
        _or_lost(restore)


def _or_lost(change: Callable[[], None]) -> None:
    try:
        change()
    except Exception as error:
        raise WeightsLost(
            f"trained and averaged weights are mixed ({type(error).__name__}: {error}): "
            "run again, from the newest checkpoint"
        ) from error


def bias_corrections(betas: tuple[float, float], count: int) -> tuple[float, float]:
    """1 - beta1^t and sqrt(1 - beta2^t), as torch.optim.AdamW applies them (arXiv 1412.6980).

    Args:
        betas: betas of Adam.
        count: t, the number of updates so far, including the current one.
    """
    beta1, beta2 = betas
    return 1 - beta1**count, math.sqrt(1 - beta2**count)


def ema_decay_at(step: int, settings: Train) -> float:
    """EMA decay at a step, with the warmup of tf.train.ExponentialMovingAverage.

    Without warmup the initial weights would dominate the average for long.

    Args:
        step: optimizer step, from 0.
        settings: `ema_decay` per step after warmup, and `ema_every_n_steps`, the steps n between
            updates. An update decays by the n-th power, the run's last update by as many steps
            as it follows the update before. At other steps the decay is 1, which has no effect.
    """
    every = settings.ema_every_n_steps
    passed = (step + 1) % every or every  # steps since the last update
    if passed < every and step + 1 < settings.steps:
        return 1.0
    decay: float = min(settings.ema_decay or 0.0, (1 + step) / (10 + step)) ** passed
    return decay


def step_scalars(step: int, learning_rate: float, settings: Train) -> NDArray[np.float32]:
    """The scalars [4] f32 of step `step` (from 0), inputs of a compiled update.

    They are learning rate, bias-corrected step size, sqrt(1 - beta2^t), and the weights' share of
    the EMA, 1 - decay: float32 keeps few digits of this difference if decay is near 1.
    """
    first, second_root = bias_corrections(settings.adam_betas, step + 1)
    ema_share = 1 - ema_decay_at(step, settings)
    return np.array((learning_rate, learning_rate / first, second_root, ema_share), np.float32)


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
        rank: rank of this process.
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
        shapes: shapes of the full arrays of this model.
        rows: index of the rows that this process needs.

    Raises:
        Refused: the state has other names or shapes.
    """
    for group, expected in shapes.items():
        saved = state.get(group, {})
        if saved.keys() != expected.keys():
            raise Refused(f"the stored {group} does not have this model's weights")
        for name, shape in expected.items():
            if tuple(saved[name].shape) != shape:
                raise Refused(f"the stored {group} has another shape for {name}")
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
