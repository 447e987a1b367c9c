"""What the loop costs: a step of it against a bare `runtime.step` on one batch, in one process.

    python -m bench.overhead JOB.json ROUNDS STEPS

Both take turns, and the one that goes first changes from round to round; the last line printed is
a JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.ours import LoopTime
from bench.report import spread
from configs.training import Train
from runtimes.base import StepOutput
from runtimes.events import Events
from runtimes.job import TrainJob, read_job
from runtimes.registry import open_runtime
from runtimes.stop import Stop
from runtimes.train.loop import make_loader, open_job_latents, train


class Collected(Events):
    """Events kept in this process, by a clock finer than theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def emit(self, event: str, **fields: Any) -> None:
        self.seen.append({"event": event, **fields, "time": time.perf_counter()})


class Bare:
    """A runtime and one batch, without the loop."""

    def __init__(self, job: TrainJob) -> None:
        settings = Train(**job.train)
        self._batch = make_loader(job, settings, open_job_latents(job.latents)).batch(0)
        self._rate = settings.learning_rate
        self.runtime = open_runtime(job.runtime, Events())
        self.runtime.load(job)

    def seconds(self, steps: int, warm_up: int) -> float:
        """Mean seconds of a step; nothing is fetched from the device in between."""
        self._run(warm_up)
        begin = time.perf_counter()
        self._run(steps)
        return (time.perf_counter() - begin) / steps

    def _run(self, steps: int) -> None:
        output: StepOutput | None = None
        for _ in range(steps):
            output = self.runtime.step(self._batch, self._rate)
        if output is not None:
            float(output.loss)


def loop_time(job: TrainJob) -> LoopTime:
    """The loop's time, in this process."""
    events = Collected()
    train(job, events, Stop())
    return LoopTime.from_events(events.seen, job.train["global_batch_size"])


def compare(job: TrainJob, rounds: int, steps: int) -> dict[str, Any]:
    """Ratio bare over loop of every round, both times, and the loop's wait for data."""
    warm_up = job.train["log_every"]
    bare = Bare(job)
    ratios, loops, bares, waits = [], [], [], []
    for number in range(rounds):
        folder = f"{job.work}-{number}"
        again = replace(job, work=folder, out=folder)
        takes: list[Callable[[], Any]] = [
            lambda again=again: loop_time(again),  # type: ignore[misc]
            lambda: bare.seconds(steps, warm_up),
        ]
        first = number % 2
        done = {first: takes[first]()}
        done[1 - first] = takes[1 - first]()
        loops.append(done[0].seconds)
        bares.append(done[1])
        waits.append(done[0].data_wait)
        ratios.append(done[1] / done[0].seconds)
    return {
        "ratio": spread(ratios),
        "loop_seconds": spread(loops),
        "bare_seconds": spread(bares),
        "data_wait": spread(waits),
    }


def main(arguments: list[str]) -> None:
    """Compare, and print."""
    path, rounds, steps = arguments
    job = read_job(Path(path))
    assert isinstance(job, TrainJob)
    print(json.dumps(compare(job, int(rounds), int(steps))))


if __name__ == "__main__":
    main(sys.argv[1:])
