"""The loss on held-out samples, taken while training with noise that never changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from runtimes.contract import Runtime
from runtimes.data.holdout import Holdout, sample_losses

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
