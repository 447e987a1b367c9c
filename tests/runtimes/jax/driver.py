"""Run on several virtual devices: a train job in this process, and what JAX counted meanwhile.

    python driver.py JOB.json           the job, whole
    python driver.py JOB.json STEP      then again from the checkpoint of that step

Prints one JSON object.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar

import jax

from runtimes.base import StepBatch, StepOutput
from runtimes.events import Events
from runtimes.jax.runtime import TheRuntime
from runtimes.job import TrainJob, read_job
from runtimes.stop import Stop
from runtimes.train import loop

COMPILED = "/jax/core/compile/backend_compile_duration"
counts = {COMPILED: 0, "/jax/compilation_cache/cache_hits": 0}


def count(event: str, *_: float, **__: str | int) -> None:
    if event in counts:
        counts[event] += 1


class Counting(TheRuntime):
    """Counts the compilations of each step; `made` are those that were opened."""

    made: ClassVar[list["Counting"]] = []

    def __init__(self, events: Events) -> None:
        super().__init__(events)
        self.by_step: list[int] = []
        self.shapes: list[str] = []
        self.made.append(self)

    def step(self, batch: StepBatch, learning_rate: float) -> StepOutput:
        before = counts[COMPILED]
        self.shapes.append(str(batch.noisy_latents.shape))
        output = super().step(batch, learning_rate)
        self.by_step.append(counts[COMPILED] - before)
        return output

    def bytes_by_device(self) -> dict[str, int]:
        """What each device holds of the state."""
        held: dict[str, int] = {}
        for array in jax.tree.leaves(self._state):
            for shard in array.addressable_shards:
                name = str(shard.device)
                held[name] = held.get(name, 0) + shard.data.nbytes
        return held


def main(path: str, *again: str) -> dict[str, Any]:
    jax.monitoring.register_event_duration_secs_listener(count)
    jax.monitoring.register_event_listener(count)
    job = read_job(Path(path))
    assert isinstance(job, TrainJob)
    loop.open_runtime = lambda name, events: Counting(events)  # type: ignore[assignment]
    loop.train(job, Events(), Stop())
    for step in again:
        for saved in (Path(job.work) / "checkpoints").iterdir():
            if int(saved.name.removeprefix("step-")) > int(step):
                shutil.rmtree(saved)
        loop.train(job, Events(), Stop())
    state = Counting.made[0]._state
    return {
        "shapes": [runtime.shapes for runtime in Counting.made],
        "by_step": [runtime.by_step for runtime in Counting.made],
        "hits": counts["/jax/compilation_cache/cache_hits"],
        "bytes": Counting.made[0].bytes_by_device(),
        "whole": sum(array.nbytes for array in jax.tree.leaves(state)),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
