"""The record of a run: one history line per step, and progress events at intervals."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from configs.settings.train import Train
from runtimes.contract import Runtime, StepBatch, StepOutput
from runtimes.process.events import Events
from runtimes.train.detect_divergence import DivergenceDetector
from runtimes.train.experiment_trackers import Trackers
from runtimes.train.mfu import BatchShapes, StepFlops


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
        divergence: of the fetched steps.
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
            loss, norm = float(pending.output.loss), float(pending.output.grad_norm)
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
        step, seconds = len(self.history), time.perf_counter() - self._since - self._paused
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
