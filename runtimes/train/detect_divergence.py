"""Divergence: a loss that is NaN or infinite, or that stays far above its recent mean."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from configs.settings.train_parts import OnDivergence

#: Number of recent losses in the mean, and the fewest that give a reliable mean.
WINDOW, MIN_LOSSES = 100, 10


class Diverged(RuntimeError):
    """The loss is not finite, or far above its recent mean, and the run must stop."""


@dataclass(frozen=True)
class DivergenceEvent:
    """The first bad step (from 1) of a divergence, and its description for a message."""

    step: int
    words: str


class DivergenceDetector:
    """Detects divergence in the losses of a run, in order. It depends on no other state.

    A loss is suspicious above `factor` times the mean of the last `WINDOW` normal losses.
    `patience` suspicious losses in a row make an event at the first one's step. A loss or norm
    that is not finite makes an event at once.

    Attributes:
        event: the detected divergence, or None.
    """

    def __init__(self, settings: OnDivergence) -> None:
        self._settings = settings
        self.reset(())

    def reset(self, losses: Iterable[float]) -> None:
        """Reset the detector and replay the losses of the completed steps."""
        self.event: DivergenceEvent | None = None
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._suspicious = 0  # steps in a row
        if self._settings.factor is not None:
            for step, loss in enumerate(losses, start=1):
                self.observe(step, loss, 0.0)

    @property
    def is_suspicious(self) -> bool:
        """Whether the last loss was suspicious: its step may become the first of an event."""
        return self._suspicious > 0

    def observe(self, step: int, loss: float, grad_norm: float) -> None:
        """Check one step's loss and gradient norm (L2, before clipping); may set `event`."""
        first = step - self._suspicious
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            words = f"the loss is {loss} and the gradient's norm {grad_norm} at step {step}"
            self.event = DivergenceEvent(first, words)
        elif (times := self._excess_ratio(loss)) is None:
            self._recent.append(loss)
            self._suspicious = 0
        else:
            self._suspicious += 1
            if self._suspicious >= self._settings.patience:
                words = f"the loss {loss:.4g} is {times:.3g} times the recent mean at step {step}"
                self.event = DivergenceEvent(first, words)

    def _excess_ratio(self, loss: float) -> float | None:
        """The ratio of `loss` to the recent mean if it exceeds `factor`, else None."""
        factor = self._settings.factor
        if factor is None or len(self._recent) < MIN_LOSSES:
            return None
        mean = math.fsum(self._recent) / len(self._recent)
        return loss / mean if loss > factor * mean else None
