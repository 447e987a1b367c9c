"""Functions that tests call in a process of runtime jax, with several virtual devices."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import training
from chained_blocks import CLASSES, Chains

from runtimes.contract import StepBatch, StepOutput
from runtimes.jax.mesh import Mesh
from runtimes.jax.runtime import TheRuntime
from runtimes.jax.scan_blocks import scanned_names
from runtimes.jax.torchax_bridge import as_function, recompute
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


def scan(fsdp: int, what: str) -> dict[str, Any]:
    """Loss and gradients of chained blocks in loops, and of the same as single blocks.

    Returns:
        Also the program's number of loops, its gathers, whether it has a stack of whole weights or
        gradients, and whether each gradient is sharded.
    """
    mesh = Mesh(fsdp)
    mesh.has_loops = True
    random = np.random.default_rng(0)
    shapes = ((4, 3, 4), (4, 5, 4), (4, 1, 8))
    normal = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    inputs = [mesh.shard_rows(array) for array in normal]
    single = Chains()
    tensors = (*single.named_parameters(), *single.named_buffers())
    plain = {name: jnp.asarray(tensor.detach().numpy()) for name, tensor in tensors}
    trained = {name for name, p in single.named_parameters() if p.requires_grad}
    looped = Chains()
    recompute(looped, what, mesh, CLASSES)
    scanned = scanned_names(looped) & trained

    def place(name: str, array: Any) -> Any:
        spread = mesh.array_sharding(array.shape) if name in scanned else mesh.replicated
        return jax.device_put(array, spread)

    def gradients(module: Any, arrays: dict[str, Any]) -> tuple[str, Any, Any]:
        call = as_function(module, training=True)
        weights = {name: arrays[name] for name in trained}

        def loss(weights: Any, inputs: Any) -> Any:
            return jnp.square(call(arrays | weights, 0, *inputs)).sum()

        program = jax.jit(jax.value_and_grad(loss)).lower(weights, inputs).compile()
        return program.as_text(), *program(weights, inputs)

    _, expected, of_single = gradients(single, plain)
    text, found, of_looped = gradients(looped, {n: place(n, a) for n, a in plain.items()})
    lines = text.splitlines()
    return {
        "single": {"loss": float(expected), "gradients": _lists(of_single)},
        "loss": float(found),
        "gradients": _lists(of_looped),
        "loops": sum(" while(" in line for line in lines),
        "stacked": "f32[3,8,4]" in text,
        "all_gathers": [line for line in lines if " all-gather(" in line],
        "sharded": {
            name: of_looped[name].sharding.is_equivalent_to(
                mesh.array_sharding(plain[name].shape), plain[name].ndim
            )
            for name in scanned
        },
    }


def _lists(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(array).tolist() for name, array in arrays.items()}
