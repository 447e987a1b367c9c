"""The PyTorch/XLA runtime: one compiled step per batch shape, over all devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_xla
from numpy.typing import NDArray
from torch_xla.debug import profiler

from configs.training import Train
from runtimes.contract import Pipeline, State, StepBatch, StepOutput, lazy_output
from runtimes.data.padding import pad_batch
from runtimes.models.dropout_seed import has_dropout, seed_dropout
from runtimes.models.flop_count import FlopCounter
from runtimes.models.micro_batches import Inputs, micro_batches
from runtimes.models.network import Network
from runtimes.models.schedulers import make_scheduler
from runtimes.objective.scheduler_config import trained_scheduler
from runtimes.process.events import Events
from runtimes.process.job import GenerateJob, TrainJob
from runtimes.process.ranks import Ranks
from runtimes.spmd.agree import join_hosts
from runtimes.xla.device import check, describe, memory_bytes, peak_flops, start, versions
from runtimes.xla.graph import recompute, replace_nearest_upsampling
from runtimes.xla.mesh import Mesh
from runtimes.xla.update import Update

__all__ = ["TheRuntime"]


class TheRuntime:
    """Implements contract.Runtime."""

    def __init__(self, events: Events) -> None:
        self.versions = versions()
        self.samples_collectively = False
        self._sampler: Any = None  # sampler.Sampler, constructed by the first call of `sample`

    def load(self, job: TrainJob) -> None:
        self._job = job
        self._settings = Train(**job.train)
        check(self._settings)
        ranks = Ranks.here()
        self._compile_cache = start(self._settings.device, job.compiled)
        self.device = describe()
        self._hosts = join_hosts(ranks)
        self._rank = ranks.rank
        self.samples_collectively = ranks.world > 1
        self._mesh = Mesh(self._settings.fsdp, ranks.world)
        self._share = self._settings.global_batch_size // ranks.world
        self._share = min(self._settings.micro_batch_size or self._share, self._share)
        self._mesh.check_rows(self._share)
        plain = self._settings.model_copy(update={"gradient_checkpointing": False})
        network = Network.load(job, plain)
        self._counter = FlopCounter(network)
        replace_nearest_upsampling(network)
        if self._settings.gradient_checkpointing:
            for part in network.children():
                recompute(part, torch_xla.device())
        self._mesh.shard_module(network)
        self._network = network.train()
        self._has_dropout = has_dropout(network)
        self._update = Update(network.trained(), self._settings, self._mesh)
        torch_xla.sync()

    def put(self, batch: StepBatch) -> StepBatch:
        return replace(batch, on_device=list(self._inputs(batch)))

    def step(self, batch: StepBatch, learning_rate: float) -> StepOutput:
        losses = []
        for inputs in batch.on_device or self._inputs(batch):
            if self._has_dropout:
                # Rank 0 on every host: SPMD hosts run one program and must draw equal masks.
                seed_dropout(self._settings.seed, batch.step, inputs.first, rank=0)
                torch_xla.manual_seed(torch.initial_seed() % 2**63)
            with self._autocast():
                errors = inputs.errors(self._network)
            loss = (inputs.weight * errors).sum() / batch.denominator
            loss.backward()
            losses.append(loss.detach())
        figures = torch.stack([torch.stack(losses).sum(), self._update.apply(learning_rate)])
        torch_xla.sync()  # starts the step and does not wait for it
        return lazy_output(lambda: list(self._mesh.fetch(figures).tolist()))

    def _inputs(self, batch: StepBatch) -> Iterator[Inputs]:
        return micro_batches(batch, self._settings.micro_batch_size, self._mesh.shard_rows)

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
        if self._rank != 0:
            yield
            return
        profiler.start_trace(folder)
        try:
            yield
        finally:
            profiler.stop_trace()

    def state(self) -> State:
        self._compile_cache.upload()
        state = self._update.state()
        constants = self._network.constants()
        if constants and self._settings.method == "full":
            state["constants"] = constants
        return state if self._rank == 0 else {}

    def restore(self, state: State, step: int) -> None:
        self._update.restore(state, step)

    def sample(self, prompts: Sequence[str], sampler: dict[str, Any]) -> NDArray[np.uint8]:
        from runtimes.xla.sampler import Sampler  # pipelines are slow to import

        model = Path(self._job.model)
        if self._sampler is None:
            vae = None if self._job.vae is None else Path(self._job.vae)
            self._sampler = Sampler(model, self._mesh, vae=vae)
            changed = trained_scheduler(model / "scheduler", self._settings)
            self._sampler.use(self._network, None if changed is None else make_scheduler(changed))
        with self._evaluating():
            return self._sampler.draw(prompts, sampler, first=0)

    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        count, whole = len(batch.timesteps), pad_batch(batch, self._share, self._mesh.local)
        with self._evaluating(), torch.no_grad():
            inputs = Inputs(whole, self._mesh.shard_rows)
            return self._mesh.fetch_rows(inputs.errors(self._network)).numpy()[:count]

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Within the context, the network has its EMA weights, if any, and no dropout."""
        self._network.eval()
        try:
            with self._update.averaged(), self._autocast():
                yield
        finally:
            self._network.train()

    def shutdown(self) -> None:
        pass  # no process has to wait for the others

    def memory_bytes(self) -> int:
        return memory_bytes()

    def pipeline(self, job: GenerateJob) -> Pipeline:
        from runtimes.xla.generate import ThePipeline

        return ThePipeline(job)

    def _autocast(self) -> AbstractContextManager[None]:
        half = self._settings.compute_dtype == "bfloat16"
        return torch.autocast("xla", dtype=torch.bfloat16, enabled=half)
