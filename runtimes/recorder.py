"""What a run tells of itself: its history of every step, and progress for those who watch."""

from __future__ import annotations

import json
import math
import time

from runtimes.base import Runtime, StepOutput
from runtimes.events import Events


class Diverged(RuntimeError):
    """The loss is no longer a number."""


class Recorder:
    """Collects step outputs and fetches them from the device only when they are wanted.

    Args:
        history: lines of JSON of the steps before, one each.
    """

    def __init__(
        self, events: Events, runtime: Runtime, history: list[str], *, total: int, batch_size: int
    ) -> None:
        self.history = history
        self._resumed, self._seconds = len(history), 0.0  # of training, up to the last report
        self._events, self._runtime = events, runtime
        self._total, self._batch_size = total, batch_size
        self._pending: list[tuple[StepOutput, float]] = []
        self._restart(0.0)

    def add(self, output: StepOutput, learning_rate: float) -> None:
        """Take a step's output, not waiting for it."""
        self._pending.append((output, learning_rate))

    def settle(self) -> dict[str, float]:
        """Wait for all outputs; the last one's values. Raises Diverged at a loss of NaN."""
        for output, rate in self._pending:
            step = len(self.history) + 1
            loss, norm = float(output.loss), float(output.grad_norm)
            if not math.isfinite(loss) or not math.isfinite(norm):
                raise Diverged(
                    f"the loss is {loss} and the gradient's norm {norm} at step {step}: lower "
                    "train.learning_rate, or set train.compute_dtype to float32; the checkpoints "
                    "before it are kept"
                )
            line = {"step": step, "loss": loss, "learning_rate": rate, "grad_norm": norm}
            self.history.append(json.dumps(line))
        self._pending.clear()
        return dict(json.loads(self.history[-1])) if self.history else {}

    def report(self, waited: float) -> None:
        """Emit a progress event. `waited` is the loader's sum of idle seconds."""
        last = self.settle()
        step, seconds = len(self.history), time.perf_counter() - self._since - self._paused
        rate = (step - self._first) * self._batch_size / max(seconds, 1e-9)
        self._seconds += seconds
        self._events.emit(
            "progress",
            **last,
            total=self._total,
            images_per_second=rate,
            data_wait=min(1.0, (waited - self._waited) / max(seconds, 1e-9)),
            eta_seconds=(self._total - step) * self._batch_size / rate,
            memory_bytes=self._runtime.memory_bytes(),
        )
        self._restart(waited)

    @property
    def images_per_second(self) -> float:
        """The rate of this process as of its last report: pauses are left out."""
        return (self._first - self._resumed) * self._batch_size / max(self._seconds, 1e-9)

    def pause(self, since: float) -> None:
        """Leave the time since `since` (perf_counter) out of the rates: it was no training."""
        self._paused += time.perf_counter() - since

    def _restart(self, waited: float) -> None:
        self._first, self._since = len(self.history), time.perf_counter()
        self._waited, self._paused = waited, 0.0
