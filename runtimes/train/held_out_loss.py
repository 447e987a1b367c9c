"""The held-out loss: the loss on held-out samples, with the same noise at every measurement."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from runtimes.contract import Runtime
from runtimes.data.holdout_batches import Holdout, draw_losses

#: Seed of the noise. It ignores the run's seed, so that losses of runs are comparable.
SEED = 0


@dataclass(frozen=True)
class HeldOutLoss:
    """The mean unweighted squared error over held-out samples, and its standard error."""

    loss: float
    error: float | None  # None for a single sample

    @classmethod
    def of(cls, draws: list[list[float]]) -> HeldOutLoss:
        """Summarise the losses of the samples (at least one), each the mean of its draws."""
        losses = [math.fsum(one) / len(one) for one in draws]
        count, mean = len(losses), math.fsum(losses) / len(losses)
        if count < 2:
            return cls(mean, None)
        variance = math.fsum((loss - mean) ** 2 for loss in losses) / (count - 1)
        return cls(mean, math.sqrt(variance / count))


def measure(runtime: Runtime, holdout: Holdout, stopping: Callable[[], bool]) -> HeldOutLoss | None:
    """The held-out loss of the current weights; None if `stopping` interrupted it.

    Every rank measures all samples, so the result does not depend on the number of ranks.
    """
    with runtime.evaluating():
        draws = draw_losses(holdout, runtime.errors, lambda: runtime.any_rank(stopping()))
    return None if draws is None else HeldOutLoss.of(draws)
