"""Swap a network's weights with their EMA, for held-out losses and samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runtimes.contract import WeightsLost


@contextmanager
def swapped(swap: Callable[[], None], restore: Callable[[], None]) -> Iterator[None]:
    """Within the context, the network has its EMA weights.

    Args:
        swap: assigns the EMA to the network.
        restore: assigns the trained weights again, exactly.

    Raises:
        WeightsLost: one of them failed.
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
