"""The record of a run: one history line per step, and progress events at intervals.

A run has diverged if its loss is NaN or infinite, or stays far above its recent mean. Model FLOP
utilisation (MFU, PaLM, arXiv 2204.02311) is the FLOP rate of training over a device's peak rate.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.settings.train import Train
from configs.settings.train_parts import OnDivergence
from runtimes.contract import Runtime, StepBatch, StepOutput
from runtimes.process.job import Events
from runtimes.train.trackers import Trackers

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


BatchShapes = tuple[tuple[str, tuple[int, ...]], ...]


class StepFlops:
    """FLOP of a step on one device, counted once per batch shape.

    Counting is slow, so it runs at the first `total` and not in the step.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._uncounted: dict[BatchShapes, StepBatch] = {}
        self._counted: dict[BatchShapes, float | None] = {}

    def register(self, batch: StepBatch) -> BatchShapes:
        """The batch's shapes; a new combination is kept for counting."""
        arrays = {"": batch.noisy_latents, **batch.conditioning}
        shapes = tuple((name, array.shape) for name, array in arrays.items())
        if shapes not in self._counted:
            self._uncounted.setdefault(shapes, replace(batch, on_device=None))
        return shapes

    def total(self, steps: Iterable[BatchShapes]) -> float | None:
        """FLOP of all steps, by their batch shapes; None if the runtime cannot count one."""
        while self._uncounted:
            shapes, batch = self._uncounted.popitem()
            self._counted[shapes] = self._runtime.flops(batch)
        known = [self._counted[shapes] for shapes in steps]
        return None if None in known else sum(filter(None, known))

    def utilisation(
        self, steps: Iterable[BatchShapes], seconds: float, peak: float | None
    ) -> dict[str, float | None]:
        """TFLOP per second of one device, and their ratio to the peak (MFU); None if unknown.

        Args:
            steps: the batch shapes of each step.
            seconds: training time of the steps.
            peak: peak FLOP per second of one device, if known.
        """
        done = self.total(steps)
        if done is None:
            return {"tflops": None, "mfu": None}
        rate = done / max(seconds, 1e-9)
        return {"tflops": rate / 1e12, "mfu": None if peak is None else rate / peak}


@dataclass(frozen=True)
class _PendingStep:
    """A step whose loss and norm the host has not yet fetched."""

    output: StepOutput
    learning_rate: float
    shapes: BatchShapes  # of its batch
    skipped: Sequence[int]


class Recorder:
    """Collects step outputs and fetches them in groups, so that no step waits for the device.

    Attributes:
        history: JSON lines, one per fetched step.
        divergence: divergence of the fetched steps.
    """

    def __init__(
        self, settings: Train, runtime: Runtime, trackers: Trackers, events: Events
    ) -> None:
        self._runtime = runtime
        self._trackers = trackers
        self._events = events
        self.divergence = DivergenceDetector(settings.divergence)
        self._flops = StepFlops(runtime)
        self._total = settings.steps
        self._batch_size = settings.global_batch_size
        tera = settings.peak_tflops
        self._peak = runtime.peak_flops() if tera is None else tera * 1e12
        self._steps = 0  # steps of this process up to the last report
        self._seconds = 0.0  # training time of those steps
        self.begin([])

    def begin(self, history: list[str]) -> None:
        """Continue after the steps of `history` (JSON lines, one per step)."""
        self.history = history
        self._pending: list[_PendingStep] = []
        self.divergence.reset(json.loads(line)["loss"] for line in history)
        self._restart(0.0)

    def add(
        self,
        batch: StepBatch,
        output: StepOutput,
        learning_rate: float,
        skipped: Sequence[int] = (),
    ) -> None:
        """Queue the output of a step without waiting for it.

        Args:
            skipped: numbers of the batches that the run skipped just before this step.
        """
        shapes = self._flops.register(batch)
        self._pending.append(_PendingStep(output, learning_rate, shapes, skipped))

    def synchronize(self) -> None:
        """Wait for all queued outputs; record them up to the first divergence."""
        for pending in self._pending:
            if self.divergence.event is not None:
                break
            step = len(self.history) + 1
            loss = float(pending.output.loss)
            norm = float(pending.output.grad_norm)
            overflowed = pending.output.overflowed
            self.divergence.observe(step, loss, 0.0 if overflowed else norm)
            line: dict[str, Any] = {"step": step, "loss": loss}
            line["learning_rate"] = pending.learning_rate
            line["grad_norm"] = None if overflowed else norm
            if overflowed:
                line["overflowed"] = True
            if pending.skipped:
                line["skipped"] = list(pending.skipped)
            self.history.append(json.dumps(line))
            self._shapes.append(pending.shapes)
        self._pending.clear()

    def last_record(self) -> dict[str, Any]:
        """The history line of the last recorded step; empty before the first."""
        return dict(json.loads(self.history[-1])) if self.history else {}

    def amend_last(self, **figures: float | None) -> None:
        """Add figures to the history line of the last recorded step, and to the trackers."""
        self.history[-1] = json.dumps(self.last_record() | figures)
        self._trackers.scalars(len(self.history), figures)

    def report(self, waited: float) -> None:
        """Emit progress up to the last recorded step.

        Args:
            waited: total seconds that the loop has waited for the loader.
        """
        step = len(self.history)
        seconds = time.perf_counter() - self._since - self._paused
        rate = (step - self._first) * self._batch_size / max(seconds, 1e-9)
        names = ("loss", "learning_rate", "grad_norm")
        last = self.last_record()
        figures = {
            **{name: last[name] for name in names},
            "images_per_second": rate,
            "data_wait": min(1.0, (waited - self._waited) / max(seconds, 1e-9)),
            "memory_bytes": self._runtime.memory_bytes(),
            **self._flops.utilisation(self._shapes, seconds, self._peak),
            **self._runtime.figures(),
        }
        eta = (self._total - step) * self._batch_size / rate
        self._events.emit("progress", step=step, total=self._total, **figures, eta_seconds=eta)
        self._trackers.scalars(step, figures)
        self._steps += step - self._first
        self._seconds += seconds
        self._restart(waited)

    @property
    def images_per_second(self) -> float:
        """Images per second of training time since this process started, as of the last report."""
        return self._steps * self._batch_size / max(self._seconds, 1e-9)

    def exclude_since(self, since: float) -> None:
        """Exclude the time from `since` (a perf_counter value) until now from the rates."""
        self._paused += time.perf_counter() - since

    def _restart(self, waited: float) -> None:
        self._first = len(self.history)
        self._since = time.perf_counter()
        self._waited = waited
        self._paused = 0.0
        self._shapes: list[BatchShapes] = []  # of the steps since the last report
