"""Command line of benchmarks of one training job: a job file in, a line of JSON out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtimes.process.job import TrainJob, read_job

Measure = Callable[[TrainJob, int, int], dict[str, Any]]  # of a job, rounds and steps


def read_train_job(path: str) -> TrainJob:
    """The training job in a file. Raises ValueError for another kind of job."""
    job = read_job(Path(path))
    if not isinstance(job, TrainJob):
        raise ValueError(f"{path}: not a training job")
    return job


def run(measure: Measure, arguments: list[str]) -> None:
    """Measure the job of the arguments JOB.json ROUNDS STEPS, and print the result."""
    path, rounds, steps = arguments
    print(json.dumps(measure(read_train_job(path), int(rounds), int(steps))))
