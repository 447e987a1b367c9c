"""When a run has gone wrong: a loss that is no number, or that stays far above what it was."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from configs.training import OnDivergence

#: Steps that the recent mean is taken over, and how many there must be to judge by it.
WINDOW, LEAST = 100, 10


class Diverged(RuntimeError):
    """The loss is no longer a number, or far above what it was."""


@dataclass(frozen=True)
class DivergenceEvent:
    """The step (from 1) that a run went wrong at, and what is wrong, in words."""

    step: int
    words: str


class DivergenceDetector:
    """Looks at the losses of a run, one after another: what it finds is a function of them alone.

    A loss above `factor` times the mean of the last `WINDOW` that were not counts as suspicious;
    `patience` of them in a row are an offence, of the first one's step. NaN is one at once.
    """

    def __init__(self, settings: OnDivergence) -> None:
        self._settings = settings
        self.begin(())

    def begin(self, losses: Iterable[float]) -> None:
        """Forget all; start from the losses of the steps so far."""
        self.event: DivergenceEvent | None = None
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._suspicious = 0  # steps in a row
        if self._settings.factor is not None:
            for step, loss in enumerate(losses, start=1):
                self.observe(step, loss, 0.0)

    @property
    def is_suspicious(self) -> bool:
        """Whether the last step was suspicious: what comes next may show that it was the first."""
        return self._suspicious > 0

    def observe(self, step: int, loss: float, grad_norm: float) -> None:
        """Look at a step's loss and gradient norm; `offence` is set once there is one."""
        first = step - self._suspicious
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            words = f"the loss is {loss} and the gradient's norm {grad_norm} at step {step}"
            self.event = DivergenceEvent(first, words)
        elif (times := self._times_the_mean(loss)) is None:
            self._recent.append(loss)
            self._suspicious = 0
        else:
            self._suspicious += 1
            if self._suspicious >= self._settings.patience:
                words = f"the loss {loss:.4g} is {times:.3g} times the recent mean at step {step}"
                self.event = DivergenceEvent(first, words)

    def _times_the_mean(self, loss: float) -> float | None:
        """How many times the recent mean, if that is too many."""
        factor = self._settings.factor
        if factor is None or len(self._recent) < LEAST:
            return None
        mean = math.fsum(self._recent) / len(self._recent)
        return loss / mean if loss > factor * mean else None
