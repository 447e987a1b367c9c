"""Our side of a comparison: training jobs and whole runs, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifacts.latent_shards import open_latents
from bench.run_without_prefect import Stages, recipe_overrides
from configs.load_recipe import CHECKOUT, load_recipe
from configs.settings.train import Train
from runtimes.process.job import TrainJob

NEVER = 10**9


@dataclass(frozen=True)
class LoopTime:
    """Speed and memory of the loop after the warm-up."""

    seconds: float  # per step, between two progress events
    data_wait: float  # fraction of the time that the device waits for data
    images_per_second: float
    memory_bytes: int
    mfu: float | None  # model FLOPs utilization, 0 to 1; None if unknown

    @classmethod
    def from_events(cls, events: Sequence[dict[str, Any]], batch_size: int) -> LoopTime:
        """From the events of a job; the first progress event ends the warm-up."""
        progress = [event for event in events if event["event"] == "progress"]
        first = progress[0]
        last = progress[-1]
        seconds = (last["time"] - first["time"]) / (last["step"] - first["step"])
        waits = [event["data_wait"] for event in progress[1:]]
        memory = max(event["memory_bytes"] for event in progress)
        mfu = last.get("mfu")
        return cls(seconds, sum(waits) / len(waits), batch_size / seconds, memory, mfu)


def encode(images: Path, model: Path, store: Path, size: int) -> str:
    """Encode a folder of pictures with our stages; the URL of the latents artifact."""
    recipe = load_recipe("digits", recipe_overrides(images, model, store, size))
    return Stages(recipe).latents().uri


def make_job(model: Path, latents: str, folder: Path, warm_up: int, **train: Any) -> TrainJob:
    """A job that reports every `warm_up` steps, without checkpoints and samples."""
    open_latents(latents)
    settings = Train(**{"logging_steps": warm_up, "checkpointing_steps": NEVER, **train})
    return TrainJob(
        runtime="torch",
        model=str(model),
        latents=latents,
        train=settings.model_dump(mode="json"),
        work=str(folder / "work"),
        out=str(folder / "out"),
    )


def time_loop(job: TrainJob) -> LoopTime:
    """Run `python -P -m runtimes` on a job and time its steps."""
    from tasks.run_job import run_job

    events: list[dict[str, Any]] = []
    run_job(job, events.append)
    return LoopTime.from_events(events, job.train["global_batch_size"])


def whole_run(
    images: Path, model: Path, folder: Path, size: int, train: dict[str, Any]
) -> tuple[float, dict[str, float]]:
    """Seconds of a process from a folder of pictures to trained weights, and of each stage."""
    overrides = recipe_overrides(images, model, folder / "store", size, **train)
    path = folder / "overrides.json"
    path.write_text(json.dumps(overrides), encoding="utf-8")
    seconds, stages = run_module("bench.run_without_prefect", str(path))
    return seconds, dict(stages)


def run_module(module: str, *arguments: str, python: str = sys.executable) -> tuple[float, Any]:
    """Run `python -m module`; its seconds, and the JSON in its last line."""
    begin = time.perf_counter()
    done = subprocess.run(
        [python, "-m", module, *arguments],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return time.perf_counter() - begin, json.loads(done.stdout.splitlines()[-1])
