"""Sample pictures of a run: the job's prompts, side by side, in `<work>/samples`."""

from __future__ import annotations

import io

import numpy as np
from fsspec.core import url_to_fs
from numpy.typing import NDArray
from PIL import Image

from artifacts.commit import write_atomic
from runtimes.contract import Runtime
from runtimes.process.events import Events
from runtimes.process.job import TrainJob
from runtimes.train.boards import Boards


class Samples:
    """Draws them. Every rank does; the first one writes."""

    def __init__(
        self,
        job: TrainJob,
        runtime: Runtime,
        events: Events,
        boards: Boards,
        *,
        writes: bool,
    ) -> None:
        self._job, self._runtime, self._events = job, runtime, events
        self._boards, self._writes = boards, writes
        self._fs, root = url_to_fs(job.work)
        self._folder = f"{root.rstrip('/')}/samples"

    def requested(self) -> bool:
        """Whether the job has prompts."""
        return bool(self._job.sample_prompts)

    def exist(self, step: int) -> bool:
        """Whether those of a step are there."""
        return bool(self._fs.exists(self._path(step)))

    def draw(self, step: int) -> None:
        """Draw those of a step; that it fails is no reason to end the run, unless others wait."""
        pictures = self._try_to_draw(step)
        if pictures is not None and self._writes:
            self._try_to_write(step, pictures)

    def _try_to_draw(self, step: int) -> NDArray[np.uint8] | None:
        try:
            return self._runtime.sample(self._job.sample_prompts, self._job.sampler)
        except Exception as error:  # out of memory, say, or a part of the pipeline is missing
            if self._runtime.samples_collectively:
                raise  # none can go on without the others
            self._warn(step, error)
            return None

    def _try_to_write(self, step: int, pictures: NDArray[np.uint8]) -> None:
        try:
            self._write(step, pictures)
        except Exception as error:  # the clients of remote stores have kinds of their own
            self._warn(step, error)

    def _warn(self, step: int, error: Exception) -> None:
        words = f"no sample pictures at step {step}: {type(error).__name__}: {error}"
        self._events.emit("warning", message=words)

    def _write(self, step: int, pictures: NDArray[np.uint8]) -> None:
        png = io.BytesIO()
        Image.fromarray(np.concatenate(list(pictures), axis=1)).save(png, "png")
        path = self._path(step)
        write_atomic(self._fs, path, png.getvalue())
        self._events.emit("sample", step=step, path=path)
        self._boards.picture(step, "samples", png.getvalue())

    def _path(self, step: int) -> str:
        return f"{self._folder}/step-{step:08d}.png"
