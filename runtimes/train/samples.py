"""Sample images during training: one PNG per step in `<work>/samples`, all prompts in a row.

The stage scores each PNG and writes the scores beside it, as JSON: a run may choose by them.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable

import numpy as np
from fsspec.core import url_to_fs
from numpy.typing import NDArray
from PIL import Image

from artifacts.records import write_atomic
from runtimes.contract import ImagesNotFinite, Runtime, WeightsLost
from runtimes.process.events import Events
from runtimes.process.job import TrainJob
from runtimes.train.experiment_trackers import Trackers

#: Seconds between looks for the scores, and the longest wait: other ranks wait in a collective.
LOOK_SECONDS, WAIT_SECONDS = 0.5, 300.0


class Samples:
    """Generates the sample images: on rank 0 alone, unless ranks generate collectively."""

    def __init__(
        self,
        job: TrainJob,
        runtime: Runtime,
        events: Events,
        trackers: Trackers,
        *,
        writes: bool,
    ) -> None:
        self._job = job
        self._runtime = runtime
        self._events = events
        self._trackers = trackers
        self._writes = writes
        self._fs, root = url_to_fs(job.work)
        self._folder = f"{root.rstrip('/')}/samples"

    def requested(self) -> bool:
        """Whether the job has sample prompts."""
        return bool(self._job.sample_prompts)

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
            pictures = self._runtime.sample(self._job.sample_prompts, self._job.sampler)
        except WeightsLost:
            raise
        except Exception as error:  # such as out of memory, or a missing pipeline component
            drawn = isinstance(error, ImagesNotFinite)  # by each rank to the end: none waits
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
