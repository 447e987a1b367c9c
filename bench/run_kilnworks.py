"""Our side of a comparison: training jobs and whole runs, each in a process of its own.

`python -m bench.run_kilnworks OVERRIDES.json` runs the first three stages of the recipe `digits`
with these dotted settings, without Prefect. The last line printed is JSON: seconds by stage.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from artifacts.latent_shards import open_latents
from artifacts.store import Artifact, Store
from bench import report
from configs.load_recipe import load_recipe
from configs.settings.recipe import Recipe
from configs.settings.train import Train
from runtimes.pipeline_folder.folder import Base
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
    from tasks.child_process import run_job

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
    begin = time.perf_counter()
    stages = report.run_module("bench.run_kilnworks", str(path))
    return time.perf_counter() - begin, dict(stages)


def no_progress(done: int, total: int, text: str = "") -> None:
    """Ignore the progress of a stage."""


class Stages:
    """The first three stages of a recipe, each built unless its artifact exists."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._store = Store(recipe.store)
        self._base = Base.open(Path(recipe.model.path))
        self.seconds: dict[str, float] = {}

    def latents(self) -> Artifact:
        """The latents of the recipe's pictures."""
        from tasks import download
        from tasks.encode.stage import EncodeStage

        plan = download.plan(self._recipe)
        images = self._artifact(download.DownloadStage(self._recipe, plan))
        return self._artifact(EncodeStage(self._recipe, images, self._base))

    def trained(self) -> Artifact:
        """The trained weights of the recipe."""
        from tasks.train import TrainStage

        return self._artifact(TrainStage(self._recipe, self.latents(), self._base, None))

    def _artifact(self, stage: Any) -> Artifact:
        from tasks.build_or_reuse import build_or_reuse

        build = partial(stage.build, progress=no_progress)
        result = build_or_reuse(self._store, stage.parts, build, parents={})
        self.seconds[stage.name] = result.seconds
        return result.load(self._store)


def recipe_overrides(
    images: Path, model: Path, store: Path, size: int, **train: Any
) -> dict[str, Any]:
    """Overrides of the recipe `digits` for a folder of pictures, without held-out pictures."""
    return {
        "source.kind": "folder",
        "source.path": str(images),
        "model.path": str(model),
        "store": str(store),
        "download.image_size": size,
        "encode.resolution": size,
        "encode.holdout": 0.0,
        **{f"train.{name}": value for name, value in train.items()},
    }


def main(arguments: list[str]) -> None:
    """Run the stages with the overrides in a file, and print their seconds."""
    stages = Stages(load_recipe("digits", json.loads(Path(arguments[0]).read_text())))
    stages.trained()
    print(json.dumps(stages.seconds))


if __name__ == "__main__":
    main(sys.argv[1:])
