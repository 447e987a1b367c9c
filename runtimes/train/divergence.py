"""Divergence of a run: its detection in the losses, and what the run does about it.

A run has diverged if its loss is NaN or infinite, or stays far above its recent mean. By
`train.divergence` it then ends, or goes back to a checkpoint and leaves a batch out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from configs.errors import Failed
from configs.settings.train import Train
from configs.settings.train_parts import OnDivergence
from runtimes.contract import Runtime

#: Number of recent losses in the mean, and the fewest that give a reliable mean.
WINDOW = 100
MIN_LOSSES = 10


@dataclass(frozen=True)
class DivergenceEvent:
    """The first bad step (from 1) of a divergence, and its description for a message."""

    step: int
    words: str


class DivergenceDetector:
    """Detects divergence in the losses of a run, in order. It depends on no other state.

    A loss is suspicious above `factor` times the mean of the last `WINDOW` normal losses.
    `patience` suspicious losses in a row make an event at the step of the first. A loss or norm
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


def event_of_ranks(
    own: DivergenceEvent | None, runtime: Runtime, settings: Train, skipped: Sequence[int]
) -> DivergenceEvent | None:
    """The divergence that requires a rollback, agreed by all ranks; None without one.

    Args:
        own: this rank's event, if any.
        skipped: numbers of the batches that the run has skipped so far.

    Raises:
        Failed: the settings demand a stop, or `max_skips` batches are already skipped.
    """
    step = runtime.broadcast(0 if own is None else own.step)
    if not step:
        return None
    event = own or DivergenceEvent(step, f"the loss has gone wrong at step {step}")
    policy = settings.divergence
    if policy.action == "stop":
        raise Failed(f"{event.words}: {advice(settings)}")
    if len(skipped) >= policy.max_skips:
        limit = f"{policy.max_skips} batches have been left out already"
        raise Failed(f"{event.words}, and {limit}: {advice(settings)}")
    return event


def advice(settings: Train) -> str:
    """What may prevent a divergence."""
    lower = "lower train.learning_rate"
    if settings.mixed_precision == "no":
        return lower
    return f"{lower}, or set train.mixed_precision to no"
