"""The history of a run: one JSON line per step, and progress events at intervals.

Step outputs are fetched from the device in groups, so that no step waits for the device.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from configs.settings.train import Train
from runtimes.contract import Runtime, StepBatch, StepOutput
from runtimes.process.job import Events
from runtimes.train.divergence import DivergenceDetector
from runtimes.train.throughput import BatchShapes, Throughput
from runtimes.train.trackers import Trackers


class Recorder:
    """Records the steps of a run, and reports them.

    Attributes:
        history: JSON lines, one per fetched step.
        divergence: divergence of the fetched steps.
        throughput: rates of the fetched steps.
    """

    def __init__(
        self, settings: Train, runtime: Runtime, trackers: Trackers, events: Events
    ) -> None:
        self._trackers = trackers
        self._events = events
        self._settings = settings
        self.divergence = DivergenceDetector(settings.divergence)
        self.throughput = Throughput(settings, runtime)
        self.begin([])

    def begin(self, history: list[str]) -> None:
        """Continue after the steps of `history` (JSON lines, one per step)."""
        self.history = history
        #: Steps that the host has not fetched: output, learning rate, batch's shapes, skipped.
        self._pending: list[tuple[StepOutput, float, BatchShapes, Sequence[int]]] = []
        self.divergence.reset(json.loads(line)["loss"] for line in history)
        self.throughput.restart(0.0)

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
        shapes = self.throughput.register(batch)
        self._pending.append((output, learning_rate, shapes, skipped))

    def synchronize(self) -> None:
        """Wait for all queued outputs; record them up to the first divergence."""
        for output, learning_rate, shapes, skipped in self._pending:
            if self.divergence.event is not None:
                break
            step = len(self.history) + 1
            loss = float(output.loss)
            norm = float(output.grad_norm)
            self.divergence.observe(step, loss, 0.0 if output.overflowed else norm)
            line: dict[str, Any] = {"step": step, "loss": loss, "learning_rate": learning_rate}
            line["grad_norm"] = None if output.overflowed else norm
            if output.overflowed:
                line["overflowed"] = True
            if skipped:
                line["skipped"] = list(skipped)
            self.history.append(json.dumps(line))
            self.throughput.add(shapes)
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
        total = self._settings.steps
        last = self.last_record()
        rates = self.throughput.figures(waited)
        figures = {name: last[name] for name in ("loss", "learning_rate", "grad_norm")} | rates
        eta = (total - step) * self._settings.global_batch_size / rates["images_per_second"]
        self._events.emit("progress", step=step, total=total, **figures, eta_seconds=eta)
        self._trackers.scalars(step, figures)
        self.throughput.restart(waited)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the context, time counts in no rate."""
        self.synchronize()  # steps that still run on the device count as training time
        since = time.perf_counter()
        yield
        self.throughput.exclude_since(since)
