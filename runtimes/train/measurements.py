"""Measurements of a run between its steps: held-out loss, sample pictures and their scores."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from configs.settings.train import Train
from runtimes.contract import Runtime
from runtimes.data.holdout_batches import Holdout
from runtimes.process.events import Events
from runtimes.process.signals import Stop
from runtimes.train.best_checkpoint import VALIDATION_LOSS, CheckpointRanking
from runtimes.train.held_out_loss import measure
from runtimes.train.recorder import Recorder
from runtimes.train.samples import Samples


@dataclass
class Measurements:
    """Measures the weights of a step if that is due. All ranks must call it in the same order.

    Attributes:
        interrupted: whether a stop request came before a score that `ranking` needs, or before the
            last step's measurement, which no later one replaces.
    """

    settings: Train
    runtime: Runtime
    holdout: Holdout | None
    samples: Samples
    ranking: CheckpointRanking
    recorder: Recorder
    events: Events
    stop: Stop
    interrupted: bool = field(default=False, init=False)

    def holdout_loss_due(self, step: int) -> bool:
        """Whether the held-out loss is due at a step."""
        interval = self.settings.holdout_loss.every_n_steps
        return is_due(step, interval) or self.ranking.needs_holdout_loss(step)

    def samples_due(self, step: int) -> bool:
        """Whether sample pictures are due at a step."""
        due = is_due(step, self.settings.sample_every_n_steps) or self.ranking.needs_samples(step)
        return self.samples.requested() and due

    def lacks_holdout_loss(self, step: int) -> bool:
        """Whether the held-out loss of the resumed step is due but not recorded."""
        return self.holdout_loss_due(step) and VALIDATION_LOSS not in self.recorder.last_record()

    def lacks_samples(self, step: int) -> bool:
        """Whether sample pictures of the resumed step, or their score, are due but missing."""
        if not self.samples_due(step):
            return False
        scored = self.ranking.field in self.recorder.last_record()
        missing = self.ranking.needs_samples(step) and not scored
        return bool(self.runtime.broadcast(missing or not self.samples.exist(step)))

    def measure_holdout_loss(self, step: int) -> None:
        """Measure the held-out loss and record it."""
        if self.holdout is None:
            return
        found = measure(self.runtime, self.holdout, lambda: self.stop.requested)
        if found is None:
            self.interrupted |= self.ranking.needs_holdout_loss(step) or self._is_last(step)
            return
        if not math.isfinite(found.loss):  # the next training loss will be NaN as well
            message = f"the held-out loss is {found.loss} at step {step}"
            self.events.emit("warning", message=message)
            return
        figures = {VALIDATION_LOSS: found.loss, "validation_error": found.error}
        self.recorder.amend_last(**figures)
        self.events.emit("validation", step=step, loss=found.loss, error=found.error)

    def sample(self, step: int) -> None:
        """Draw the sample pictures; record their score if `ranking` needs it."""
        needed = self.ranking.needs_samples(step)
        if self.runtime.any_rank(self.stop.requested):
            self.interrupted |= needed or self._is_last(step)
            return
        drawn = self.samples.draw(step)
        if needed:
            self._record_score(step, drawn=drawn)

    def _is_last(self, step: int) -> bool:
        return step == self.settings.steps

    def _record_score(self, step: int, *, drawn: bool) -> None:
        """Add the score of the samples to the history of rank 0, which chooses."""
        scores: dict[str, float] | None = {}
        if drawn:
            scores = self.samples.scores(step, lambda: self.stop.requested)
        self.interrupted |= self.runtime.any_rank(scores is None)
        if scores and (score := scores.get(self.ranking.field)) is not None:
            self.recorder.amend_last(**{self.ranking.field: score})


def is_due(step: int, interval: int) -> bool:
    """Whether a step ends an interval; an interval of 0 has no end."""
    return bool(interval) and step % interval == 0
