"""The training loop, the same for every runtime: resume, step, log, checkpoint, sample, finish."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import numpy as np
from fsspec.core import url_to_fs
from PIL import Image
from pydantic import ValidationError

from artifacts.commit import write_atomic
from artifacts.latents import Latents, open_latents
from configs.training import CARRYING_OUT, Train
from runtimes.base import Runtime, WrongInput
from runtimes.checkpoint import Checkpoint, CheckpointNotWritten, Checkpoints
from runtimes.events import Events
from runtimes.families import detect_family
from runtimes.job import TrainJob
from runtimes.loader import Loader
from runtimes.objective import LatentScale, NoiseSchedule, Objective
from runtimes.recorder import Recorder
from runtimes.registry import open_runtime
from runtimes.result import write_result
from runtimes.schedule import learning_rate
from runtimes.stop import Stop


def train(job: TrainJob, events: Events, stop: Stop) -> bool:
    """Do the job, or as much of it as there is time for.

    Returns True when it is done; False when it stopped early, with no step lost.

    Raises:
        WrongInput: the job cannot be done as asked.
        Diverged: the loss became NaN.
        CheckpointNotWritten: it was to stop, and what it has done since the last one is lost.
    """
    settings = read_settings(job)
    loader = make_loader(job, settings, open_job_latents(job.latents))
    runtime = open_runtime(job.runtime, events)  # slow to import: what is cheap is checked first
    runtime.load(job)
    run = _Run(job, settings, runtime, events)
    step = run.resume()
    stop.defer()
    with loader.ahead(step, settings.steps, settings.prefetch, lambda: stop.requested) as batches:
        for batch in batches:
            rate = learning_rate(step, settings)
            run.recorder.add(runtime.step(batch, rate), rate)
            step += 1
            if step % settings.log_every == 0 or step == settings.steps:
                run.recorder.report(batches.waited)
            if step % settings.checkpoint_every == 0:
                run.checkpoint(step)
            if settings.sample_every and step % settings.sample_every == 0 and not stop.requested:
                run.sample(step)
        if step < settings.steps:
            run.checkpoint(step, last=True)
            return False
    run.finish()
    return True


def read_settings(job: TrainJob) -> Train:
    """The job's train settings. Raises WrongInput, naming the first that is wrong."""
    try:
        return Train(**job.train)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, ("train", *first["loc"])))
        raise WrongInput(f"{name}: {first['msg']}") from None


def make_loader(job: TrainJob, settings: Train, latents: Latents) -> Loader:
    """The loader of a job: its model's family and noise schedule, its settings' objective."""
    folder = Path(job.model)
    family = detect_family(folder)
    objective = Objective(
        schedule=read_schedule(folder),
        scale=LatentScale.from_info(latents.info),
        seed=settings.seed,
        prediction_type=settings.prediction_type,
        snr_gamma=settings.snr_gamma,
        noise_offset=settings.noise_offset,
        caption_dropout=settings.caption_dropout,
    )
    return Loader(
        latents,
        family,
        objective,
        batch_size=settings.global_batch_size,
        seed=settings.seed,
        window=settings.shuffle_window,
        cache_bytes=settings.cache_bytes,
    )


def read_schedule(folder: Path) -> NoiseSchedule:
    """The noise schedule that a pipeline was trained with. Raises WrongInput."""
    path = folder / "scheduler" / "scheduler_config.json"
    try:
        return NoiseSchedule.from_config(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise WrongInput(f"{path} is missing: the noise schedule is read from it") from None
    except ValueError as error:
        raise WrongInput(f"{path}: {error}") from None


def open_job_latents(url: str) -> Latents:
    """The latents artifact that a job names. Raises WrongInput."""
    try:
        return open_latents(url)
    except (OSError, ValueError) as error:
        raise WrongInput(f"latents {url}: {error}") from None


class _Run:
    """What happens beside the steps: resuming, checkpoints, sample pictures, the result."""

    def __init__(self, job: TrainJob, settings: Train, runtime: Runtime, events: Events) -> None:
        self._job, self._settings, self._runtime, self._events = job, settings, runtime, events
        self._checkpoints = Checkpoints(job.work, settings.keep_checkpoints)
        self._saved = 0  # step of the newest checkpoint

    def resume(self) -> int:
        """Continue from the newest checkpoint, if there is one; the number of steps done."""
        saved = self._checkpoints.latest()
        if saved is not None:
            self._check_same_run(saved)
            self._runtime.restore(saved.state, saved.step)
            self._saved = saved.step
        self.recorder = Recorder(
            self._events,
            self._runtime,
            [] if saved is None else saved.history,
            total=self._settings.steps,
            batch_size=self._settings.global_batch_size,
        )
        self._events.emit(
            "start",
            runtime=self._job.runtime,
            device=self._runtime.device,
            versions=self._runtime.versions,
            step=self._saved,
            total=self._settings.steps,
        )
        return self._saved

    def _check_same_run(self, saved: Checkpoint) -> None:
        before, now = saved.facts["train"], self._settings.model_dump(mode="json")
        for name in sorted(set(now) - CARRYING_OUT):
            if before.get(name) != now[name]:
                raise WrongInput(
                    f"{self._job.work} holds a run with train.{name}={before.get(name)}, this one "
                    f"asks for {now[name]}: give it a work folder of its own"
                )

    def checkpoint(self, step: int, last: bool = False) -> None:
        """Commit one; a disk that is full costs this checkpoint, not the run.

        If it is the `last` before the process ends, CheckpointNotWritten is raised instead.
        """
        self.recorder.settle()  # what the device still does is training, and no pause
        since = time.perf_counter()
        if step > self._saved:
            facts = {
                "runtime": self._job.runtime,
                "versions": self._runtime.versions,
                "seed": self._settings.seed,
                "samples_seen": step * self._settings.global_batch_size,
                "train": self._settings.model_dump(mode="json"),
            }
            try:
                path, size = self._checkpoints.save(
                    step, self._runtime.state(), self.recorder.history, facts
                )
            except CheckpointNotWritten as error:
                if last:
                    raise
                self._events.emit("warning", message=str(error))
            else:
                self._saved = step
                seconds = round(time.perf_counter() - since, 3)
                self._events.emit("checkpoint", step=step, path=path, seconds=seconds, bytes=size)
        self.recorder.pause(since)

    def sample(self, step: int) -> None:
        """Draw the job's prompts side by side; that it fails is no reason to end the run."""
        if not self._job.sample_prompts:
            return
        self.recorder.settle()
        since = time.perf_counter()
        try:
            self._events.emit("sample", step=step, path=self._draw(step))
        except Exception as error:  # out of memory, say, or a part of the pipeline is missing
            words = f"no sample pictures at step {step}: {type(error).__name__}: {error}"
            self._events.emit("warning", message=words)
        self.recorder.pause(since)

    def _draw(self, step: int) -> str:
        """Path of the picture, below `<work>/samples/`."""
        pictures = self._runtime.sample(self._job.sample_prompts, self._job.sampler)
        png = io.BytesIO()
        Image.fromarray(np.concatenate(list(pictures), axis=1)).save(png, "png")
        fs, root = url_to_fs(self._job.work)
        path = f"{root}/samples/step-{step:08d}.png"
        write_atomic(fs, path, png.getvalue())
        return path

    def finish(self) -> None:
        """Write the trained model."""
        files = write_result(self._job, self._runtime.state(), self.recorder.history)
        self._events.emit(
            "result",
            files=files,
            step=self._settings.steps,
            samples_seen=self._settings.steps * self._settings.global_batch_size,
            images_per_second=self.recorder.images_per_second,
        )
