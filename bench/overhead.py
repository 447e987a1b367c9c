"""Overhead of the training loop: its steps against bare calls of `runtime.step`, in one process.

    python -m bench.overhead JOB.json ROUNDS STEPS

Blocks of a few steps alternate, so that drift of the machine's speed affects both equally. The last
line printed is JSON.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from statistics import fmean
from typing import Any

from bench.job_command_line import run
from bench.report import spread
from configs.settings.train import Train
from runtimes.data.loader import open_job_latents
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import Events, TrainJob
from runtimes.process.launcher import Stop
from runtimes.registry import open_runtime
from runtimes.train.training_loop import make_loader, train


class BareSteps:
    """Steps of a runtime on one batch, without the loop."""

    def __init__(self, job: TrainJob) -> None:
        settings = Train(**job.train)
        base = Base.of(job)
        self.batch = make_loader(job, base, settings, open_job_latents(job.latents)).batch(0)
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


def compare(job: TrainJob, rounds: int, steps: int) -> dict[str, Any]:
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


if __name__ == "__main__":
    run(compare, sys.argv[1:])
