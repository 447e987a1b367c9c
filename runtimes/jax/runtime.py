"""The JAX runtime: one compiled step per batch shape, over all devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from numpy.typing import NDArray

from configs.settings.train import Train
from runtimes import contract
from runtimes.base_runtime import BaseRuntime
from runtimes.jax import device
from runtimes.jax import step as steps
from runtimes.jax.mesh import Mesh
from runtimes.jax.scan_blocks import scanned_names
from runtimes.jax.torchax_bridge import as_function, recompute_blocks
from runtimes.objective.random_draws import Stream, generator
from runtimes.optimizer_state import owned_copies, read_state_arrays, shapes_of, step_scalars
from runtimes.pipeline_folder.folder import Base
from runtimes.process.collectives import join_hosts
from runtimes.process.job import TrainJob
from runtimes.process.launcher import Ranks
from runtimes.torch_models.loading import trained_scheduler
from runtimes.torch_models.network import FlopCounter, Network, as_base, has_dropout


class TheRuntime(BaseRuntime):
    """Implements contract.Runtime."""

    _compiled_step: Any = None
    #: What `_averaged` returned within `evaluating`; None outside.
    _evaluated: steps.Arrays | None = None

    def load(self, job: TrainJob, base: Base) -> None:
        self._base = base
        self.versions = device.versions()
        settings = self._settings = Train(**job.train)
        device.check(settings)
        ranks = self._ranks = Ranks.here()
        self._collectives = join_hosts(ranks)
        self.samples_collectively = ranks.world > 1
        device.join(ranks, self._collectives, settings.device)
        self._compile_cache = device.start(settings.device, job.compiled, settings.compute_dtype)
        self.device = device.describe()
        self._mesh = Mesh(settings.fsdp)
        network = self._network = load_network(job, base, settings, self._mesh)
        self._counter = FlopCounter(network, self._mesh.local)
        self._persistent = super()._constants()  # a copy: `frozen_arrays` frees the buffers
        self._has_dropout = has_dropout(network)
        self._state = steps.initial_state(network, settings, self._mesh)
        self._names = steps.trained_names(network)
        half = getattr(torch, settings.compute_dtype)
        self._frozen = steps.frozen_arrays(network, self._mesh, half)
        self._prior_weights: steps.Arrays = {}
        if job.has_prior and settings.method == "full":  # a copy: each step frees the state's
            dtype = jnp.dtype(settings.compute_dtype)
            copied = jax.jit(partial(jax.tree.map, lambda a: jnp.copy(a.astype(dtype))))
            self._prior_weights = copied(self._state["weights"])
        self._rows = settings.micro_batch(ranks.world)
        self._updates = 0
        predict = as_function(network, training=False, splash=self._mesh.splash_attention())
        self._errors = jax.jit(partial(steps.errors, predict))
        self._working = jax.jit(
            lambda weights: steps.gather_weights(weights, self._mesh, settings.compute_dtype)
        )

    def put(self, batch: contract.StepBatch) -> contract.StepBatch:
        return replace(batch, on_device=self._stack(batch))

    def _stack(self, batch: contract.StepBatch) -> steps.Stacked:
        """Stacked micro-batches, their rows sharded over all devices."""
        dtype = jnp.dtype(self._settings.compute_dtype)
        stacked = steps.stack_micro_batches(batch, self._rows, self._mesh, dtype)
        return jax.tree.map(lambda array: self._mesh.shard_rows(array, axis=1), stacked)

    def step(self, batch: contract.StepBatch, learning_rate: float) -> contract.StepOutput:
        if self._compiled_step is None:
            self._compiled_step = self._compile(batch)
        stacked = dict(batch.on_device or self._stack(batch))
        is_prior = stacked.pop("is_prior", None)
        # Processes run one program together, whichever of them has such rows.
        if is_prior is not None and (batch.has_prior or self._ranks.world > 1):
            with as_base(self._network):
                stacked["target"] = self._prior_targets(stacked, is_prior)
        self._state, figures = self._compiled_step(
            self._state,
            self._frozen,
            stacked,
            self._seeds(batch.step, len(stacked["weight"])),
            step_scalars(self._updates, learning_rate, self._settings),
            np.float32(batch.denominator),
        )
        self._updates += 1
        return contract.lazy_output(lambda: list(np.asarray(figures).tolist()))

    @cached_property
    def _prior_targets(self) -> Any:
        """Compiled `steps.prior_targets`; it is traced within `as_base`."""
        predict = as_function(self._network, training=False, splash=self._mesh.splash_attention())
        run = partial(steps.prior_targets, predict, self._mesh)
        dtype = self._settings.compute_dtype

        def targets(weights: steps.Arrays, frozen: steps.Arrays, *rows: Any) -> jax.Array:
            gathered = steps.gather_weights(weights, self._mesh, dtype)
            named = {self._names[name]: array for name, array in gathered.items()}
            return run(frozen | named, *rows)

        compiled = jax.jit(targets)
        return lambda *rows: compiled(self._prior_weights, self._frozen, *rows)

    def _compile(self, batch: contract.StepBatch) -> Any:
        untouched = steps.names_without_gradient(self._counter, self._network, batch)
        predict = as_function(self._network, training=True, splash=self._mesh.splash_attention())
        scanned = scanned_names(self._network)
        step = steps.Step(predict, self._settings, self._mesh, self._names, untouched, scanned)
        return step.compiled(self._state)

    def _seeds(self, step: int, count: int) -> NDArray[np.uint32]:
        """Dropout seed of each micro-batch [count]; zeros without dropout."""
        if not self._has_dropout:
            return np.zeros(count, np.uint32)
        rngs = (generator(self._settings.seed, Stream.DROPOUT, step, n) for n in range(count))
        return np.array([rng.integers(2**32) for rng in rngs], np.uint32)

    def peak_flops(self) -> float | None:
        return device.peak_flops(self._settings.compute_dtype)

    def state_shapes(self) -> contract.StateShapes:
        return shapes_of(self._state) | shapes_of(self._constants())

    def state(self, owners: contract.Owners | None = None) -> contract.State:
        self._compile_cache.upload()
        rank = self._ranks.rank
        gather = self._mesh.gather
        state = owned_copies(self._state, owners, rank, np.array, lambda name, a: gather(a))
        return state | owned_copies(self._constants(), owners, rank, np.array)

    def restore(self, state: contract.SavedState, step: int) -> None:
        shapes = shapes_of(self._state)
        arrays = read_state_arrays(state, shapes, lambda name, shape: self._mesh.local_rows(shape))
        for group, name, rows in arrays:
            self._state[group][name] = self._mesh.shard_rows_of(shapes[group][name], rows)
        self._updates = step

    def _constants(self) -> contract.State:
        return self._persistent

    def errors(self, batch: contract.StepBatch) -> NDArray[np.float32]:
        dtype = jnp.dtype(self._settings.compute_dtype)
        arrays = self._averaged()
        return steps.held_out_errors(self._errors, arrays, batch, self._rows, self._mesh, dtype)

    def _averaged(self) -> steps.Arrays:
        """The network's arrays in the compute dtype, with EMA weights if there is an EMA.

        Every device has all of them. Within `evaluating` they are gathered once.
        """
        if self._evaluated:
            return self._evaluated
        weights = self._working(self._state.get("ema", self._state["weights"]))
        arrays = self._frozen | {self._names[name]: array for name, array in weights.items()}
        if self._evaluated is not None:
            self._evaluated = arrays
        return arrays

    def sample(
        self, prompts: Sequence[str], sampler: dict[str, Any], controls: Sequence[str] = ()
    ) -> NDArray[np.uint8]:
        try:
            return super().sample(prompts, sampler, controls)
        finally:
            self._sampler.release()

    def shutdown(self) -> None:
        if self._ranks.world > 1:
            device.shut_down(self._ranks, self._collectives)

    def memory_bytes(self) -> int:
        return device.memory_bytes()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """`_averaged` has the EMA weights, and the sampler's programs have no dropout."""
        self._evaluated = {}
        try:
            yield
        finally:
            self._evaluated = None

    def _trace(self, folder: str) -> AbstractContextManager[None]:
        return jax.profiler.trace(folder)

    def _open_sampler(self) -> Any:
        return self._sampler

    @cached_property
    def _sampler(self) -> Any:
        """The sampler of all calls: another sampler would compile its programs again."""
        from runtimes.jax.sampler import Sampler  # pipelines are slow to import

        sampler = Sampler(self._base, self._mesh, self._settings.compute_dtype)
        sampler.use(self._network, self._averaged, trained_scheduler(self._base, self._settings))
        return sampler


def load_network(job: TrainJob, base: Base, settings: Train, mesh: Mesh) -> Network:
    """Load the trained network to the CPU, with JAX's gradient checkpointing. Raises Refused."""
    plain = settings.model_copy(update={"gradient_checkpointing": "none"})
    network = Network.load(job, base, plain)
    recompute_blocks(network, settings, mesh)
    return network
