"""What a run tells of itself: its history of every step, and progress for those who watch."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runtimes.contract import Runtime, StepBatch, StepOutput
from runtimes.process.events import Events
from runtimes.train.boards import Boards
from runtimes.train.divergence import DivergenceDetector
from runtimes.train.flops import Shapes, StepFlops


@dataclass(frozen=True)
class _PendingStep:
    """A step that was taken, whose output may still be on its way."""

    output: StepOutput
    learning_rate: float
    shapes: Shapes  # of its batch
    left_out: Sequence[int]


class Recorder:
    """Collects step outputs and fetches them from the device only when they are wanted.

    Args:
        batch_size: the global one.
        peak: FLOP a second that one device can do, if known.
    """

    def __init__(
        self,
        events: Events,
        boards: Boards,
        runtime: Runtime,
        divergence: DivergenceDetector,
        *,
        total: int,
        batch_size: int,
        peak: float | None = None,
    ) -> None:
        self._events, self._boards, self._runtime = events, boards, runtime
        self._divergence, self._flops = divergence, StepFlops(runtime)
        self._total, self._batch_size, self._peak = total, batch_size, peak
        self._steps, self._seconds = 0, 0.0  # of training, up to the last report
        self.begin([])

    def begin(self, history: list[str]) -> None:
        """Start after the steps of a history: lines of JSON, one a step."""
        self.history = history
        self._pending: list[_PendingStep] = []
        self._divergence.begin(json.loads(line)["loss"] for line in history)
        self._restart(0.0)

    def add(
        self,
        batch: StepBatch,
        output: StepOutput,
        learning_rate: float,
        left_out: Sequence[int] = (),
    ) -> None:
        """Take a step's output, not waiting for it.

        Args:
            left_out: numbers of the batches that were left out just before it.
        """
        taken = _PendingStep(output, learning_rate, self._flops.register(batch), left_out)
        self._pending.append(taken)

    def synchronize(self) -> None:
        """Wait for all outputs. What follows an offence against divergence is not recorded."""
        for taken in self._pending:
            if self._divergence.event is not None:
                break
            step = len(self.history) + 1
            loss, norm = float(taken.output.loss), float(taken.output.grad_norm)
            overflowed = taken.output.overflowed
            self._divergence.observe(step, loss, 0.0 if overflowed else norm)
            line: dict[str, Any] = {"step": step, "loss": loss}
            line |= {"learning_rate": taken.learning_rate}
            line |= {"grad_norm": None, "overflowed": True} if overflowed else {"grad_norm": norm}
            left_out = {"skipped": list(taken.left_out)} if taken.left_out else {}
            self.history.append(json.dumps(line | left_out))
            self._shapes.append(taken.shapes)
        self._pending.clear()

    def last_record(self) -> dict[str, Any]:
        """The line of the last step that is settled."""
        return dict(json.loads(self.history[-1])) if self.history else {}

    @property
    def validation_loss(self) -> float | None:
        """The validation loss after the last step, if it was taken."""
        return self.last_record().get("validation_loss")

    def amend_last(self, **facts: float | None) -> None:
        """Add to the line of the last step."""
        self.history[-1] = json.dumps(self.last_record() | facts)

    def report(self, waited: float) -> None:
        """Emit progress of what is settled. `waited` is the loader's sum of idle seconds."""
        step, seconds = len(self.history), time.perf_counter() - self._since - self._paused
        rate = (step - self._first) * self._batch_size / max(seconds, 1e-9)
        names = ("loss", "learning_rate", "grad_norm")
        last = self.last_record()
        figures = {
            **{name: last[name] for name in names},
            "images_per_second": rate,
            "data_wait": min(1.0, (waited - self._waited) / max(seconds, 1e-9)),
            "memory_bytes": self._runtime.memory_bytes(),
            **self._work_done(seconds),
            **getattr(self._runtime, "figures", dict)(),
        }
        eta = (self._total - step) * self._batch_size / rate
        self._events.emit("progress", step=step, total=self._total, **figures, eta_seconds=eta)
        self._boards.scalars(step, figures)
        self._steps, self._seconds = self._steps + step - self._first, self._seconds + seconds
        self._restart(waited)

    def _work_done(self, seconds: float) -> dict[str, float | None]:
        """TFLOP a second of one device, and what share of its peak that is (see flops.py)."""
        done = self._flops.total(self._shapes)
        if done is None:
            return {"tflops": None, "mfu": None}
        rate = done / max(seconds, 1e-9)
        return {"tflops": rate / 1e12, "mfu": None if self._peak is None else rate / self._peak}

    @property
    def images_per_second(self) -> float:
        """The rate of this process as of its last report: pauses are left out."""
        return self._steps * self._batch_size / max(self._seconds, 1e-9)

    def exclude_since(self, since: float) -> None:
        """Leave the time since `since` (perf_counter) out of the rates: it was no training."""
        self._paused += time.perf_counter() - since

    def _restart(self, waited: float) -> None:
        self._first, self._since = len(self.history), time.perf_counter()
        self._waited, self._paused = waited, 0.0
        self._shapes: list[Shapes] = []  # of the steps since
