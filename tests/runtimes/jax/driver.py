"""Functions that tests call in a process of runtime jax, with several virtual devices."""

from typing import Any, ClassVar

import jax
import training

from runtimes.contract import StepBatch, StepOutput
from runtimes.jax.runtime import TheRuntime
from runtimes.process.job import TrainJob
from runtimes.train import training_loop

COMPILED, HIT = "/jax/core/compile/backend_compile_duration", "/jax/compilation_cache/cache_hits"
counts = {COMPILED: 0, HIT: 0}


def count(event: str, *_: float, **__: str | int) -> None:
    if event in counts:
        counts[event] += 1


class Counting(TheRuntime):
    """Counts the compilations of each step; `made` are those that were opened."""

    made: ClassVar[list["Counting"]] = []

    def __init__(self) -> None:
        super().__init__()
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


def train(given: dict[str, Any], *again: int) -> dict[str, Any]:
    """Do a job, then from the checkpoints of some steps again; what JAX counted.

    Args:
        again: steps.
    """
    jax.monitoring.register_event_duration_secs_listener(count)
    jax.monitoring.register_event_listener(count)
    job = TrainJob(**given)
    training_loop.open_runtime = lambda name: Counting()  # type: ignore[assignment]
    began, hits, left = [training.train(job)], [counts[HIT]], [training.results(job)]
    for step in again:
        training.roll_back(job, step)
        began.append(training.train(job))
        hits.append(counts[HIT] - hits[-1])
        left.append(training.results(job))
    state = Counting.made[0]._state
    return {
        "began": began,
        "hits": hits,
        "left": left,
        "kept in": jax.config.jax_compilation_cache_dir,
        "shapes": [runtime.shapes for runtime in Counting.made],
        "by_step": [runtime.by_step for runtime in Counting.made],
        "bytes": Counting.made[0].bytes_by_device(),
        "whole": sum(array.nbytes for array in jax.tree.leaves(state)),
    }
