"""The PyTorch/XLA runtime: one compiled step per batch shape, over all devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch_xla
from numpy.typing import NDArray
from torch_xla.debug import profiler

from configs.settings.train import Train
from runtimes.base_runtime import BaseRuntime
from runtimes.contract import Owners, State, StepBatch, StepOutput
from runtimes.data.padding import pad_batch
from runtimes.process.collectives import join_hosts
from runtimes.process.job import TrainJob
from runtimes.process.ranks import Ranks
from runtimes.spmd.tpu_slices import check_rows
from runtimes.torch_models.flop_count import FlopCounter
from runtimes.torch_models.make_scheduler import trained_scheduler
from runtimes.torch_models.micro_batches import Inputs
from runtimes.torch_models.network import Network
from runtimes.xla.clip_update_and_ema import Update
from runtimes.xla.device import check, describe, memory_bytes, peak_flops, start, versions
from runtimes.xla.gradient_checkpointing import recompute
from runtimes.xla.mesh import Mesh
from runtimes.xla.step import Step


class TheRuntime(BaseRuntime):
    """Implements contract.Runtime."""

    def load(self, job: TrainJob) -> None:
        self._job = job
        self.versions = versions()
        settings = self._settings = Train(**job.train)
        check(settings)
        ranks = self._ranks = Ranks.here()
        self._compile_cache = start(settings.device, job.compiled)
        self.device = describe()
        self._collectives = join_hosts(ranks)
        self.samples_collectively = ranks.world > 1
        self._mesh = Mesh(settings.fsdp, ranks.world)
        self._rows = settings.micro_batch(ranks.world)
        check_rows(settings, ranks.world, self._mesh.local)
        plain = settings.model_copy(update={"gradient_checkpointing": "none"})
        network = self._network = Network.load(job, plain)
        self._counter = FlopCounter(network)
        if settings.gradient_checkpointing == "blocks":
            for part in network.parts.values():
                recompute(part, self._mesh)
        self._mesh.shard_module(network)
        network.train()
        self._update = Update(network.trained(), settings, self._mesh)
        self._step = Step(network, self._update, self._mesh, settings)
        torch_xla.sync()

    def put(self, batch: StepBatch) -> StepBatch:
        return replace(batch, on_device=list(self._step.inputs(batch)))

    def step(self, batch: StepBatch, learning_rate: float) -> StepOutput:
        return self._step(batch, learning_rate)

    def flops(self, batch: StepBatch) -> float | None:
        whole = self._counter.of(batch)
        return None if whole is None else whole * self._ranks.world / self._mesh.count

    def peak_flops(self) -> float | None:
        return peak_flops(self._settings.compute_dtype)

    def state(self, owners: Owners | None = None) -> State:
        self._compile_cache.upload()
        return super().state(owners)

    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        count, whole = len(batch.timesteps), pad_batch(batch, self._rows, self._mesh.local)
        with torch.no_grad():
            inputs = Inputs(whole, self._mesh.shard_rows)
            return self._mesh.fetch_rows(inputs.errors(self._network)).numpy()[:count]

    def memory_bytes(self) -> int:
        return memory_bytes()

    def _autocast(self) -> AbstractContextManager[None]:
        return self._step.autocast()

    @contextmanager
    def _trace(self, folder: str) -> Iterator[None]:
        profiler.start_trace(folder)
        try:
            yield
        finally:
            profiler.stop_trace()

    def _open_sampler(self) -> Any:
        from runtimes.xla.sampler import Sampler  # pipelines are slow to import

        job, dtype = self._job, self._settings.compute_dtype
        sampler = Sampler(job.model_folder, self._mesh, dtype, job.vae_folder)
        sampler.use(self._network, trained_scheduler(job.model_folder, self._settings))
        return sampler
