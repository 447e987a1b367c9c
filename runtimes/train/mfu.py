"""Model FLOP utilisation (MFU): the FLOP rate of training over a device's peak rate.

Source: PaLM, arXiv 2204.02311.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from runtimes.contract import Runtime, StepBatch

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
