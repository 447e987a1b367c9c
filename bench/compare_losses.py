"""Compare losses and gradient norms of a diffusers script with ours, on its recorded batches.

    python -m bench.compare_losses JOB.json RECORD_FOLDER

diffusers_script_hooks.py records latents, noise, timesteps and conditioning of each step of the
script. Our objective and runtime repeat the steps from the same weights. The last line printed is
JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.job_command_line import read_train_job
from configs.settings.train import Train
from runtimes.contract import StepBatch
from runtimes.objective.training_objective import LatentScale, Objective
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import TrainJob
from runtimes.registry import open_runtime
from runtimes.train.training_run import learning_rate

CONDITIONING = ("prompt_embeds", "pooled_prompt_embeds", "add_time_ids")
Arrays = dict[str, NDArray[np.float32]]


def compare(job: TrainJob, record: Path) -> dict[str, Any]:
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
    """The maximum, or NaN if one of them is NaN, which `max` can drop."""
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
    print(json.dumps(compare(read_train_job(arguments[0]), Path(arguments[1]))))


if __name__ == "__main__":
    main(sys.argv[1:])
