"""Steps of one training job: bare, in the loop, and on the recorded batches of a diffusers script.

    python -m bench.job_steps overhead JOB.json ROUNDS STEPS
    python -m bench.job_steps losses JOB.json RECORD_FOLDER

`overhead` compares steps of the loop with bare calls of `runtime.step`, in blocks that alternate:
drift of the machine's speed affects both equally. `losses` repeats a script's steps with our
objective and runtime from the same weights; diffusers_script_hooks.py recorded latents, noise,
timesteps and conditioning. The last line printed is JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts.latent_shards import LatentScale
from bench.report import spread
from configs.settings.train import Train
from runtimes.contract import StepBatch
from runtimes.data.loader import open_job_latents
from runtimes.learning_rate import learning_rate
from runtimes.objective.training_objective import Objective
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import Events, TrainJob, read_job
from runtimes.process.launcher import Stop
from runtimes.registry import open_runtime
from runtimes.train.training_loop import make_batches, train

CONDITIONING = ("prompt_embeds", "pooled_prompt_embeds", "add_time_ids")
Arrays = dict[str, NDArray[np.float32]]


def read_train_job(path: str) -> TrainJob:
    """The training job in a file. Raises ValueError for another kind of job."""
    job = read_job(Path(path))
    if not isinstance(job, TrainJob):
        raise ValueError(f"{path}: not a training job")
    return job


class BareSteps:
    """Steps of a runtime on one batch, without the loop."""

    def __init__(self, job: TrainJob) -> None:
        settings = Train(**job.train)
        base = Base.of(job)
        loader, _ = make_batches(job, base, settings, open_job_latents(job.latents))
        self.batch = loader.batch(0)
        self._rate = settings.learning_rate
        self.runtime = open_runtime(job.runtime)
        self.runtime.load(job, base)

    def seconds(self, steps: int) -> float:
        """Seconds of `steps` steps, without a synchronization between them."""
        begin = time.perf_counter()
        output = None
        for _ in range(steps):
            output = self.runtime.step(self.batch, self._rate)
        if output is not None:
            float(output.loss)
        return time.perf_counter() - begin


class Alternating(Events):
    """After each block of the loop's steps, run and time as many bare steps."""

    def __init__(self, bare: BareSteps) -> None:
        super().__init__()
        self._bare = bare
        self._step = 0
        self._since = 0.0
        self.loops: list[float] = []  # seconds of each block
        self.bares: list[float] = []
        self.waits: list[float] = []

    def emit(self, event: str, **fields: Any) -> None:
        if event != "progress":
            return
        seconds = time.perf_counter() - self._since
        steps = fields["step"] - self._step
        bare = self._bare.seconds(steps)
        if self._step:  # the first block warms up
            self.loops.append(seconds)
            self.bares.append(bare)
            self.waits.append(fields["data_wait"])
        self._step = fields["step"]
        self._since = time.perf_counter()


def compare_with_loop(job: TrainJob, rounds: int, steps: int) -> dict[str, Any]:
    """Ratio bare / loop, seconds per step of both, and data wait of the loop, over the rounds."""
    block = job.train["logging_steps"]
    blocks = max(1, steps // block)
    total = block * (1 + rounds * blocks)
    events = Alternating(BareSteps(job))
    train(replace(job, train={**job.train, "steps": total}), events, Stop())

    def by_round(values: list[float]) -> list[float]:
        return [fmean(values[n * blocks : (n + 1) * blocks]) for n in range(rounds)]

    loops = by_round(events.loops)
    bares = by_round(events.bares)
    return {
        "ratio": spread([bare / loop for bare, loop in zip(bares, loops, strict=True)]),
        "loop_seconds": spread([seconds / block for seconds in loops]),
        "bare_seconds": spread([seconds / block for seconds in bares]),
        "data_wait": spread(by_round(events.waits)),
    }


def compare_losses(job: TrainJob, record: Path) -> dict[str, Any]:
    """Maximum relative differences of loss and gradient norm over all recorded steps."""
    settings = Train(**job.train)
    base = Base.of(job)
    objective = Objective.of(settings, base.schedule(settings), LatentScale(1.0))
    runtime = open_runtime(job.runtime)
    runtime.load(job, base)
    losses = []
    norms = []
    for step, arrays in enumerate(_recorded(record)):
        output = runtime.step(_batch(step, arrays, objective), learning_rate(step, settings))
        losses.append(_difference(float(output.loss), arrays["loss"]))
        norms.append(_difference(float(output.grad_norm), arrays["grad_norm"]))
    if not losses:
        raise ValueError(f"{record}: no recorded steps")
    return {
        "steps": len(losses),
        "max_relative_loss_difference": largest(losses),
        "max_relative_grad_norm_difference": largest(norms),
    }


def largest(values: list[float]) -> float:
    """The maximum, or NaN if a value is NaN, which `max` can drop."""
    return float(np.max(values))


def _recorded(folder: Path) -> Iterator[Arrays]:
    for path in sorted(folder.glob("*.npz")):
        with np.load(path, allow_pickle=False) as file:
            yield {name: file[name] for name in file.files}


def _batch(step: int, arrays: Arrays, objective: Objective) -> StepBatch:
    """The batch of a recorded step, with noisy latents, target and weight of our objective."""
    latents = arrays["latents"]
    noise = arrays["noise"]
    levels = arrays["timesteps"].astype(np.int32)
    schedule = objective.schedule
    return StepBatch(
        step=step,
        noisy_latents=schedule.add_noise(latents, noise, levels),
        timesteps=schedule.timesteps(levels),
        target=schedule.target(latents, noise, levels),
        weight=objective.weight(levels, schedule),
        conditioning={name: arrays[name] for name in CONDITIONING},
        denominator=len(levels),
    )


def _difference(ours: float, theirs: NDArray[np.float32]) -> float:
    return abs(ours - float(theirs)) / abs(float(theirs))


def main(arguments: list[str]) -> None:
    """Compare, and print the result."""
    what, path, *rest = arguments
    job = read_train_job(path)
    if what == "overhead":
        print(json.dumps(compare_with_loop(job, *map(int, rest))))
    else:
        print(json.dumps(compare_losses(job, Path(*rest))))


if __name__ == "__main__":
    main(sys.argv[1:])
