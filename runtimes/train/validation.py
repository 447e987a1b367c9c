"""Measurements of a run between its steps: held-out loss, sample pictures and their scores.

The held-out loss is that of held-out samples, with the same noise at every measurement. Sample
images are one PNG per step in `<work>/samples`, all prompts in a row. The stage scores each PNG and
writes the scores beside it, as JSON: a run may choose by them.

The best checkpoint and the early stop follow from the history alone, by the rule
`train.best_checkpoint`. A checkpoint contains the history, so a resumed run stops at the same step
and chooses the same checkpoint.
"""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from fsspec.core import url_to_fs
from numpy.typing import NDArray
from PIL import Image

from artifacts.records import write_atomic
from configs.settings.train import Train
from configs.settings.train_parts import BestCheckpoint
from runtimes.contract import ImagesNotFinite, Runtime, WeightsLost
from runtimes.data.loader import Holdout, draw_losses
from runtimes.process.job import Events, TrainJob
from runtimes.process.launcher import Stop
from runtimes.train.history import Recorder
from runtimes.train.trackers import Trackers

#: Seed of the noise. It ignores the run's seed, so that losses of runs are comparable.
SEED = 0


@dataclass(frozen=True)
class HeldOutLoss:
    """The mean unweighted squared error over held-out samples, and its standard error.

    Of a mixture, the samples are those of the sources to learn, if they have any.
    """

    loss: float
    error: float | None  # None for a single sample
    by_source: dict[str, float] = field(default_factory=dict)  # of the sources of a mixture

    @classmethod
    def of(cls, draws: list[list[float]]) -> HeldOutLoss:
        """Summarise the losses of the samples (at least one), each the mean of its draws."""
        losses = [math.fsum(sample) / len(sample) for sample in draws]
        count = len(losses)
        mean = math.fsum(losses) / len(losses)
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
    if draws is None:
        return None
    by_source: dict[str, list[list[float]]] = {}
    for source, losses in zip(holdout.sources, draws, strict=True):
        by_source.setdefault(source, []).append(losses)
    by_source.pop("", None)
    losses_of = {source: HeldOutLoss.of(losses).loss for source, losses in by_source.items()}
    learnt = [
        losses
        for source, losses in zip(holdout.sources, draws, strict=True)
        if source not in holdout.regularised
    ]
    return replace(HeldOutLoss.of(learnt or draws), by_source=losses_of)


#: Seconds between looks for the scores, and the longest wait: other ranks wait in a collective.
LOOK_SECONDS = 0.5
WAIT_SECONDS = 300.0


class Samples:
    """Generates the sample images: on rank 0 alone, unless ranks generate collectively.

    Attributes:
        requested: whether the job has sample prompts.
    """

    def __init__(
        self, job: TrainJob, runtime: Runtime, events: Events, trackers: Trackers, *, writes: bool
    ) -> None:
        self._job = job
        self._runtime = runtime
        self._events = events
        self._trackers = trackers
        self._writes = writes
        self.requested = bool(job.sample_prompts)
        self._fs, root = url_to_fs(job.work)
        self._folder = f"{root.rstrip('/')}/samples"

    def exist(self, step: int) -> bool:
        """Whether the image of a step is already in the work folder."""
        return bool(self._fs.exists(self._path(step)))

    def scores(self, step: int, stopping: Callable[[], bool]) -> dict[str, float] | None:
        """Wait for the scores of a step's image, by name; None after a stop request.

        They are empty if the stage failed to score it or, with a warning, does not score images.
        """
        until = time.monotonic() + WAIT_SECONDS
        while not stopping():
            try:
                return dict(json.loads(self._fs.cat_file(scores_path(self._path(step)))))
            except Exception as error:  # not there yet, or the store does not respond
                if time.monotonic() > until:
                    reason = f"{type(error).__name__}: {error}"
                    message = f"no scores of the sample pictures at step {step}: {reason}"
                    self._events.emit("warning", message=message)
                    return {}
            time.sleep(LOOK_SECONDS)
        return None

    def draw(self, step: int) -> bool:
        """Generate and write the image of a step; whether this rank wrote it.

        A failure is logged and training continues, unless ranks generate collectively.

        Raises:
            WeightsLost: training cannot continue.
        """
        if not (self._writes or self._runtime.samples_collectively):
            return False
        try:
            job = self._job
            pictures = self._runtime.sample(job.sample_prompts, job.sampler, job.sample_controls)
        except WeightsLost:
            raise
        except Exception as error:  # such as out of memory, or a missing pipeline component
            drawn = isinstance(error, ImagesNotFinite)  # each rank has drawn to the end: none waits
            if self._runtime.samples_collectively and not drawn:
                raise  # the other ranks would wait in a collective for ever
            self._warn(step, error)
            return False
        try:
            if self._writes:
                self._write(step, pictures)
        except Exception as error:  # clients of remote stores define their own exception types
            self._warn(step, error)
            return False
        return self._writes

    def _warn(self, step: int, error: Exception) -> None:
        message = f"no sample pictures at step {step}: {type(error).__name__}: {error}"
        self._events.emit("warning", message=message)

    def _write(self, step: int, pictures: NDArray[np.uint8]) -> None:
        png = io.BytesIO()
        Image.fromarray(np.concatenate(list(pictures), axis=1)).save(png, "png")
        path = self._path(step)
        if self._fs.exists(old := scores_path(path)):  # of an image before a rollback
            self._fs.rm_file(old)
        write_atomic(self._fs, path, png.getvalue())
        self._events.emit("sample", step=step, path=path)
        self._trackers.picture(step, "samples", png.getvalue())

    def _path(self, step: int) -> str:
        return f"{self._folder}/step-{step:08d}.png"


def scores_path(image: str) -> str:
    """Path of the scores of a sample image: JSON, name -> score."""
    return f"{image.removesuffix('.png')}.json"


#: The name of the held-out loss in history.jsonl and in trackers.
VALIDATION_LOSS = "validation_loss"


class CheckpointRanking:
    """Ranks the checkpoints of a run: the scheduled ones, and the last step.

    A checkpoint of a stop request between them is no candidate, since another run may lack it.

    Args:
        settings: without a rule, candidates are ranked by held-out loss.

    Attributes:
        field: field of a history line with the score.
    """

    def __init__(self, settings: Train) -> None:
        self._chooses = settings.best_checkpoint is not None
        self._rule = settings.best_checkpoint or BestCheckpoint()
        self._sign = 1 if self._rule.lower_is_better else -1
        self._interval = settings.checkpointing_steps
        self._steps = settings.steps
        self.field = self._rule.metric if self._rule.by_samples else VALIDATION_LOSS

    def is_candidate(self, step: int) -> bool:
        """Whether the rule may choose a step; False without a rule."""
        return self._chooses and (step % self._interval == 0 or step == self._steps)

    def needs_holdout_loss(self, step: int) -> bool:
        """Whether the rule needs the held-out loss of a step."""
        return self.is_candidate(step) and not self._rule.by_samples

    def needs_samples(self, step: int) -> bool:
        """Whether the rule needs scored sample pictures of a step."""
        return self.is_candidate(step) and self._rule.by_samples

    def scores(self, history: Sequence[str]) -> dict[int, float]:
        """Step -> score of each scored candidate, in order.

        Args:
            history: JSON lines, one per step.
        """
        steps = {*range(self._interval, len(history) + 1, self._interval)}
        steps |= {self._steps} if len(history) >= self._steps else set()
        values = ((step, json.loads(history[step - 1]).get(self.field)) for step in sorted(steps))
        return {step: score for step, score in values if score is not None}

    def best_first(self, history: Sequence[str]) -> list[int]:
        """Steps of the scored candidates, the best first; the earlier step wins a tie."""
        scores = self.scores(history)
        return sorted(scores, key=lambda step: (self._sign * scores[step], step))

    def is_exhausted(self, history: Sequence[str]) -> bool:
        """Whether `patience` candidates in a row improved the score by `min_delta` or less."""
        if self._rule.patience is None:
            return False
        best = float("inf")
        without = 0
        for score in self.scores(history).values():
            if self._sign * score < best - self._rule.min_delta:
                best = self._sign * score
                without = 0
            else:
                without += 1
        return without >= self._rule.patience

    def reason(self, chosen: int, history: Sequence[str]) -> str:
        """Why a step was chosen, for people; empty without a rule."""
        scores = self.scores(history)
        metric = self._rule.metric
        if not self._chooses:
            return ""
        if chosen not in scores:
            return f"the last step, since no checkpoint with a {metric} was left"
        word = "lowest" if self._rule.lower_is_better else "highest"
        text = f"the {word} {metric} of {len(scores)} checkpoints: {scores[chosen]:.4g}"
        if (best := self.best_first(history)[0]) != chosen:
            text += f"; the checkpoint of step {best} was lost"
        return text


@dataclass
class Measurements:
    """Measures the weights of a step if that is due. All ranks must call it in the same order.

    Attributes:
        interrupted: whether a stop request came before a score that `ranking` needs, or before the
            last step's measurement, which no later measurement replaces.
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
        return self.samples.requested and due

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
        held_out = measure(self.runtime, self.holdout, lambda: self.stop.requested)
        if held_out is None:
            self.interrupted |= self.ranking.needs_holdout_loss(step) or self._is_last(step)
            return
        if not math.isfinite(held_out.loss):  # the next training loss will be NaN as well
            message = f"the held-out loss is {held_out.loss} at step {step}"
            self.events.emit("warning", message=message)
            return
        figures = {VALIDATION_LOSS: held_out.loss, "validation_error": held_out.error}
        figures |= {f"{VALIDATION_LOSS}/{name}": loss for name, loss in held_out.by_source.items()}
        self.recorder.amend_last(**figures)
        self.events.emit("validation", step=step, **vars(held_out))

    def sample(self, step: int) -> None:
        """Draw the sample pictures; record their score if `ranking` needs it."""
        needed = self.ranking.needs_samples(step)
        if self.runtime.any_rank(self.stop.requested):
            self.interrupted |= needed or self._is_last(step)
            return
        drawn = self.samples.draw(step)
        if not needed:
            return
        scores: dict[str, float] | None = {}
        if drawn:  # on rank 0, which chooses
            scores = self.samples.scores(step, lambda: self.stop.requested)
        self.interrupted |= self.runtime.any_rank(scores is None)
        if scores and (score := scores.get(self.ranking.field)) is not None:
            self.recorder.amend_last(**{self.ranking.field: score})

    def _is_last(self, step: int) -> bool:
        return step == self.settings.steps


def is_due(step: int, interval: int) -> bool:
    """Whether a step ends an interval; an interval of 0 has no end."""
    return bool(interval) and step % interval == 0
