"""The loss on held-out samples, taken while training with noise that never changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtimes.contract import Runtime, StepBatch
from runtimes.data.loader import Holdout

#: Of the noise: the same for every run, so that runs with other seeds can be compared.
SEED = 0


@dataclass(frozen=True)
class HeldOutLoss:
    """The mean over samples of their unweighted squared errors, and its standard error."""

    loss: float
    error: float | None  # None of a single sample

    @classmethod
    def of(cls, losses: list[float]) -> HeldOutLoss:
        """From the loss of each sample."""
        count, mean = len(losses), math.fsum(losses) / len(losses)
        if count < 2:
            return cls(mean, None)
        variance = math.fsum((loss - mean) ** 2 for loss in losses) / (count - 1)
        return cls(mean, math.sqrt(variance / count))


def measure(runtime: Runtime, holdout: Holdout, stopping: Callable[[], bool]) -> HeldOutLoss | None:
    """The loss of the weights as they are; None if it was to stop before it was done.

    Every rank measures all of it, so that it does not depend on how many there are.
    """
    losses = sample_losses(holdout, runtime.errors, lambda: runtime.any_rank(stopping()))
    return None if losses is None else HeldOutLoss.of(losses)


def sample_losses(
    holdout: Holdout,
    errors: Callable[[StepBatch], NDArray[np.float32]],
    stopping: Callable[[], bool] = lambda: False,
) -> list[float] | None:
    """Each held-out sample's loss, averaged over its draws; None if it was to stop before.

    Args:
        errors: the mean squared error of each sample of a batch [B].
    """
    found: dict[int, list[float]] = {}
    for numbers, batch in holdout.batches():
        if stopping():
            return None
        for number, error in zip(numbers, errors(batch).tolist(), strict=True):
            found.setdefault(number, []).append(error)
    return [math.fsum(found[n]) / len(found[n]) for n in sorted(found)]
