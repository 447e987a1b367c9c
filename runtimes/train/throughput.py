"""Throughput of a run: images and FLOP per second of training time, waits, the profiler's trace.

Model FLOP utilisation (MFU, PaLM, arXiv 2204.02311) is the FLOP rate of training over a device's
peak rate. A profiler traces selected steps, to `<work>/profile`.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from configs.secrets import one_line
from configs.settings.train import Train
from configs.settings.train_parts import Profile
from runtimes.contract import Runtime, StepBatch

log = logging.getLogger("kiln")
#: (keyword, shape) of each array of a step's batch.
BatchShapes = tuple[tuple[str, tuple[int, ...]], ...]


class Throughput:
    """Rates of the steps since the last report, and of all steps of this process.

    FLOP of a step on one device are counted once per batch shape. Counting is slow, so it runs at
    a report and not in the step.
    """

    def __init__(self, settings: Train, runtime: Runtime) -> None:
        self._runtime = runtime
        self._batch_size = settings.global_batch_size
        tera = settings.peak_tflops
        self._peak = runtime.peak_flops() if tera is None else tera * 1e12
        self._uncounted: dict[BatchShapes, StepBatch] = {}
        self._counted: dict[BatchShapes, float | None] = {}
        self._all_steps = 0  # of this process up to the last report
        self._all_seconds = 0.0  # training time of those steps
        self.restart(0.0)

    def restart(self, waited: float) -> None:
        """Begin an interval between reports.

        Args:
            waited: total seconds that the loop has waited for the loader.
        """
        self._since = time.perf_counter()
        self._waited = waited
        self._paused = 0.0
        self._steps: list[BatchShapes] = []

    def register(self, batch: StepBatch) -> BatchShapes:
        """The batch's shapes; a new combination is kept for counting."""
        arrays = {"": batch.noisy_latents, **batch.conditioning}
        shapes = tuple((name, array.shape) for name, array in arrays.items())
        if shapes not in self._counted:
            self._uncounted.setdefault(shapes, replace(batch, on_device=None))
        return shapes

    def add(self, shapes: BatchShapes) -> None:
        """Count a completed step with the shapes of its batch."""
        self._steps.append(shapes)

    def exclude_since(self, since: float) -> None:
        """Exclude the time from `since` (a perf_counter value) until now from the rates."""
        self._paused += time.perf_counter() - since

    def figures(self, waited: float) -> dict[str, Any]:
        """The rates since the last report; `tflops` (of one device) and `mfu` are None if unknown.

        Args:
            waited: total seconds that the loop has waited for the loader.
        """
        seconds = time.perf_counter() - self._since - self._paused
        self._all_steps += len(self._steps)
        self._all_seconds += seconds
        divisor = max(seconds, 1e-9)
        flop = self._flop()
        rate = None if flop is None else flop / divisor
        return {
            "images_per_second": len(self._steps) * self._batch_size / divisor,
            "data_wait": min(1.0, (waited - self._waited) / divisor),
            "memory_bytes": self._runtime.memory_bytes(),
            "tflops": None if rate is None else rate / 1e12,
            "mfu": None if rate is None or self._peak is None else rate / self._peak,
            **self._runtime.figures(),
        }

    def _flop(self) -> float | None:
        """FLOP of the steps since the last report; None if the runtime cannot count one."""
        while self._uncounted:
            shapes, batch = self._uncounted.popitem()
            self._counted[shapes] = self._runtime.flops(batch)
        counts = [self._counted[shapes] for shapes in self._steps]
        return None if None in counts else sum(filter(None, counts))

    @property
    def images_per_second(self) -> float:
        """Images per second of training time since this process started, as of the last report."""
        return self._all_steps * self._batch_size / max(self._all_seconds, 1e-9)


class Profiling:
    """Traces `steps` steps, the first at index `start` (from 0).

    A run that resumes after `start` has no trace.
    """

    def __init__(self, settings: Profile, work: str, runtime: Runtime) -> None:
        self._start = settings.start
        self._end = settings.start + settings.steps
        self._work = work
        self._runtime = runtime
        self._tracing = ExitStack()

    def changes(self, step: int) -> bool:
        """Whether a trace starts or ends before this step."""
        return self._start < self._end and step in (self._start, self._end)

    def before(self, step: int) -> None:
        """Start or end the trace, if it is due before this step."""
        if step == self._end:
            self.close()
        elif step == self._start:
            folder = self._tracing.enter_context(_trace_folder(self._work))
            self._tracing.enter_context(self._runtime.profile(folder))

    def close(self) -> None:
        """End the active trace, if any."""
        self._tracing.close()


@contextmanager
def _trace_folder(work: str) -> Iterator[str]:
    """A local folder for the trace; at exit its files are in `<work>/profile`.

    A remote store that does not accept them costs the trace, but not the training.
    """
    fs, root = url_to_fs(work)
    target = f"{root.rstrip('/')}/profile"
    if isinstance(fs, LocalFileSystem):
        fs.makedirs(target, exist_ok=True)
        yield target
        return
    with tempfile.TemporaryDirectory(prefix="kiln-profile-") as folder:
        yield folder
        try:
            for path in sorted(p for p in Path(folder).rglob("*") if p.is_file()):
                stored = f"{target}/{path.relative_to(folder).as_posix()}"
                fs.makedirs(stored.rpartition("/")[0], exist_ok=True)
                fs.put_file(str(path), stored)
        except Exception as error:  # clients of remote stores define their own exception types
            log.warning("the profiler trace could not be stored: %s", one_line(error))
