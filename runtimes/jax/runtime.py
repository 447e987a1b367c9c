"""The JAX runtime: one compiled step per batch shape, over all devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from numpy.typing import NDArray

from configs.training import Train
from runtimes.contract import Pipeline, State, StepBatch, StepOutput, lazy_output
from runtimes.jax.batches import Stacked, held_out_errors, shard_stacked, stack
from runtimes.jax.bridge import as_function, recompute
from runtimes.jax.device import (
    check,
    describe,
    join,
    memory_bytes,
    peak_flops,
    shut_down,
    start,
    versions,
)
from runtimes.jax.mesh import Mesh
from runtimes.jax.step import Arrays, Step, errors, gather_weights, step_scalars
from runtimes.jax.weights import (
    check_state,
    frozen_arrays,
    initial_state,
    names_without_gradient,
    trained_names,
)
from runtimes.models.dropout_seed import has_dropout
from runtimes.models.flop_count import FlopCounter
from runtimes.models.network import Network
from runtimes.models.schedulers import make_scheduler
from runtimes.objective.random import Stream, generator
from runtimes.objective.scheduler_config import trained_scheduler
from runtimes.process.events import Events
from runtimes.process.job import GenerateJob, TrainJob
from runtimes.process.ranks import Ranks
from runtimes.spmd.agree import join_hosts

__all__ = ["TheRuntime"]


class TheRuntime:
    """Implements contract.Runtime."""

    def __init__(self, events: Events) -> None:
        self.versions = versions()
        self.samples_collectively = False
        self._sampler: Any = None  # sampler.Sampler, constructed by the first call of `sample`
        self._compiled_step: Any = None

    def load(self, job: TrainJob) -> None:
        self._job = job
        self._settings = Train(**job.train)
        check(self._settings)
        ranks = self._ranks = Ranks.here()
        self._hosts = join_hosts(ranks)
        self.samples_collectively = ranks.world > 1
        join(ranks, self._hosts, self._settings.device)
        self._compile_cache = start(
            self._settings.device, job.compiled, self._settings.compute_dtype
        )
        self.device = describe()
        self._mesh = Mesh(self._settings.fsdp)
        network = load_network(job, self._settings)
        self._counter = FlopCounter(network)
        self._constants = network.constants() if self._settings.method == "full" else {}
        self._has_dropout = has_dropout(network)
        self._state = initial_state(network, self._settings, self._mesh)
        self._names = trained_names(network)
        half = getattr(torch, self._settings.compute_dtype)
        self._frozen = frozen_arrays(network, self._mesh, half)
        share = self._settings.global_batch_size // ranks.world
        self._share = min(self._settings.micro_batch_size or share, share)
        self._network = network
        self._step = 0
        predict = as_function(network, training=False)
        self._errors = jax.jit(partial(errors, predict))
        self._working = jax.jit(
            lambda weights: gather_weights(weights, self._mesh, self._settings.compute_dtype)
        )

    def put(self, batch: StepBatch) -> StepBatch:
        return replace(batch, on_device=shard_stacked(self._stack(batch), self._mesh))

    def _stack(self, batch: StepBatch) -> Stacked:
        dtype = jnp.dtype(self._settings.compute_dtype)
        return stack(batch, self._share, self._mesh, dtype)

    def step(self, batch: StepBatch, learning_rate: float) -> StepOutput:
        if self._compiled_step is None:
            self._compiled_step = self._compile(batch)
        stacked = batch.on_device or shard_stacked(self._stack(batch), self._mesh)
        self._state, figures = self._compiled_step(
            self._state,
            self._frozen,
            stacked,
            self._seeds(batch.step, len(stacked["weight"])),
            step_scalars(self._step, learning_rate, self._settings),
            np.float32(batch.denominator),
        )
        self._step += 1
        return lazy_output(lambda: list(np.asarray(figures).tolist()))

    def _compile(self, batch: StepBatch) -> Any:
        untouched = frozenset[str]()
        if self._settings.train_text_encoder:
            untouched = names_without_gradient(self._counter.network, self._network, batch)
        predict = as_function(self._network, training=True)
        step = Step(predict, self._settings, self._mesh, self._names, untouched)
        return step.compiled(self._state)

    def _seeds(self, step: int, count: int) -> NDArray[np.uint32]:
        """Dropout seed of each micro-batch [count]; zeros without dropout."""
        if not self._has_dropout:
            return np.zeros(count, np.uint32)
        rngs = (generator(self._settings.seed, Stream.DROPOUT, step, n) for n in range(count))
        return np.array([rng.integers(2**32) for rng in rngs], np.uint32)

    def flops(self, batch: StepBatch) -> float | None:
        whole = self._counter.of(batch)
        return None if whole is None else whole * self._hosts.world / self._mesh.count

    def peak_flops(self) -> float | None:
        return peak_flops(self._settings.compute_dtype)

    def any_rank(self, flag: bool) -> bool:
        return self._hosts.any(flag)

    def broadcast(self, number: int) -> int:
        return self._hosts.broadcast(number)

    @contextmanager
    def profile(self, folder: str) -> Iterator[None]:
        if not self._ranks.first:
            yield
            return
        with jax.profiler.trace(folder):
            yield

    def state(self) -> State:
        self._compile_cache.upload()
        state: State = {}
        for group, arrays in self._state.items():
            for name, array in arrays.items():
                whole = self._mesh.fetch(array)
                if self._ranks.first:
                    state.setdefault(group, {})[name] = whole
        if state and self._constants:
            state["constants"] = self._constants
        return state

    def restore(self, state: State, step: int) -> None:
        check_state(state, self._state)
        for group, arrays in self._state.items():
            for name in arrays:
                arrays[name] = self._mesh.shard(state[group][name])
        self._step = step

    def sample(self, prompts: Sequence[str], sampler: dict[str, Any]) -> NDArray[np.uint8]:
        from runtimes.jax.sampler import Sampler  # pipelines are slow to import

        model = Path(self._job.model)
        if self._sampler is None:
            vae = None if self._job.vae is None else Path(self._job.vae)
            changed = trained_scheduler(model / "scheduler", self._settings)
            scheduler = None if changed is None else make_scheduler(changed)
            dtype = self._settings.compute_dtype
            self._sampler = Sampler(model, self._mesh, dtype, vae)
            self._sampler.use(self._network, scheduler)
        return self._sampler.draw(self._averaged(), prompts, sampler, first=0)

    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        dtype = jnp.dtype(self._settings.compute_dtype)
        return held_out_errors(
            self._errors, self._averaged(), batch, self._share, self._mesh, dtype
        )

    def _averaged(self) -> Arrays:
        """The network's arrays in the compute dtype, with EMA weights if there is an EMA."""
        weights = self._working(self._state.get("ema", self._state["weights"]))
        return self._frozen | {self._names[name]: array for name, array in weights.items()}

    def shutdown(self) -> None:
        if self._ranks.world > 1:
            shut_down(self._ranks, self._hosts)

    def memory_bytes(self) -> int:
        return memory_bytes()

    def pipeline(self, job: GenerateJob) -> Pipeline:
        from runtimes.jax.generate import ThePipeline

        return ThePipeline(job)


def load_network(job: TrainJob, settings: Train) -> Network:
    """Load the trained network to the CPU, with JAX's gradient checkpointing. Raises WrongInput."""
    network = Network.load(job, settings.model_copy(update={"gradient_checkpointing": False}))
    if settings.gradient_checkpointing:
        for part in network.children():
            recompute(part)
    return network
