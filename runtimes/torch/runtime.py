"""The PyTorch runtime: trains diffusers denoisers on CPU, CUDA, Ascend and Gaudi."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from configs.training import Train
from runtimes.contract import Pipeline, State, StepBatch, StepOutput
from runtimes.models.dropout_seed import has_dropout, seed_dropout
from runtimes.models.flop_count import FlopCounter, peak_flops
from runtimes.models.micro_batches import Inputs, micro_batches, sender
from runtimes.models.network import Network
from runtimes.models.precision import check_precision
from runtimes.models.schedulers import make_scheduler
from runtimes.objective.scheduler_config import trained_scheduler
from runtimes.process.collectives import HostCollectives
from runtimes.process.events import Events
from runtimes.process.job import GenerateJob, TrainJob
from runtimes.process.ranks import Ranks
from runtimes.torch.channels_last import keep_channels_last, memory_format
from runtimes.torch.device import (
    describe,
    make_deterministic,
    open_device,
    peak_bytes,
    probe,
    versions,
)
from runtimes.torch.npu import enable_npu_attention
from runtimes.torch.parallel import open_parallel
from runtimes.torch.profile import tracing
from runtimes.torch.update import Update

__all__ = ["TheRuntime", "probe"]


class TheRuntime:
    """Implements contract.Runtime."""

    def __init__(self, events: Events) -> None:
        self.versions = versions()
        self.samples_collectively = False
        self._sampler: Any = None  # generate.Sampler, constructed by the first call of `sample`

    def load(self, job: TrainJob) -> None:
        self._job = job
        self._settings = Train(**job.train)
        check_precision(self._settings)
        make_deterministic()
        ranks = Ranks.here()
        self._rank = ranks.rank
        self.samples_collectively = ranks.world > 1 and self._settings.fsdp != 1
        self._device_kind = open_device(
            self._settings.device, ranks, self._settings.hpu, job.compiled
        )
        self._device_kind.check(self._settings)
        self._device = self._device_kind.device
        self._parallel = open_parallel(self._settings, ranks, self._device)
        self._agreement = HostCollectives(ranks.world)
        self.device = describe(self._device)
        network = Network.load(job, self._settings)
        self._counter = FlopCounter(network)
        layout = memory_format(self._device, sharded=self._parallel.sharded)
        network.place(self._device, layout)
        if layout == torch.channels_last:
            keep_channels_last(network)
        network.train()
        enable_npu_attention(network.denoiser, self._device)
        self._has_dropout = has_dropout(network)
        self._network = network
        self._device_kind.prepare_training(network.denoiser)
        if self._settings.compile:
            network.denoiser.compile(backend=self._device_kind.compile_backend)
        self._forward = self._parallel.wrap(network)
        masters = self._parallel.masters()
        self._update = Update(masters, self._settings, self._parallel, self._device_kind)
        self._device_kind.mark_step()

    def put(self, batch: StepBatch) -> StepBatch:
        if not self._device_kind.prefetches_batches:
            return batch
        return replace(batch, on_device=list(self._inputs(batch)))

    def step(self, batch: StepBatch, learning_rate: float) -> StepOutput:
        loss = torch.zeros((), device=self._device)
        for inputs in batch.on_device or self._inputs(batch):
            if self._has_dropout:
                seed_dropout(self._settings.seed, batch.step, inputs.first, self._rank)
            with self._parallel.accumulating(last=inputs.last):
                with self._autocast():
                    errors = inputs.errors(self._forward)
                part = (inputs.weight * errors).sum() / batch.denominator
                # DDP and FSDP average gradients over processes; the step needs their sum.
                (part * self._parallel.world).backward()
            loss += part.detach()
            if not inputs.last:
                self._device_kind.mark_step()
        self._parallel.gather_gradients()
        return StepOutput(self._parallel.sum_over_ranks(loss), self._update.apply(learning_rate))

    def _inputs(self, batch: StepBatch) -> Iterator[Inputs]:
        return micro_batches(batch, self._settings.micro_batch_size, sender(self._device))

    def flops(self, batch: StepBatch) -> float | None:
        return self._counter.of(batch)

    def peak_flops(self) -> float | None:
        return peak_flops(self._device, self._settings.compute_dtype)

    def any_rank(self, flag: bool) -> bool:
        return self._agreement.any(flag)

    def broadcast(self, number: int) -> int:
        return self._agreement.broadcast(number)

    def profile(self, folder: str) -> AbstractContextManager[None]:
        if not self._parallel.first:
            return nullcontext()
        return tracing(Path(folder), self._device)

    def state(self) -> State:
        self._device_kind.save_compiled()
        state = self._update.state()
        constants = self._network.constants()
        if state and constants and self._settings.method == "full":
            state["constants"] = constants
        return state

    def restore(self, state: State, step: int) -> None:
        self._update.restore(state, step)
        self._device_kind.mark_step()

    def sample(self, prompts: Sequence[str], sampler: dict[str, Any]) -> NDArray[np.uint8]:
        from runtimes.torch.sampler import Sampler  # pipelines are slow to import

        if self._sampler is None:
            vae = None if self._job.vae is None else Path(self._job.vae)
            model, parts = Path(self._job.model), dict(self._network.named_children())
            self._sampler = Sampler(model, parts, self._device_kind, vae=vae)
            changed = trained_scheduler(model / "scheduler", self._settings)
            if changed is not None:
                self._sampler.use({"scheduler": make_scheduler(changed)})
        with self._evaluating():
            return self._sampler.draw(prompts, sampler, first=0)

    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        # Not inference_mode: FSDP trains with the tensors that it gathers here.
        with self._evaluating(), torch.no_grad():
            errors = Inputs(batch, sender(self._device)).errors(self._network)
        return errors.cpu().numpy()

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
        return peak_bytes(self._device)

    def figures(self) -> dict[str, float]:
        return self._device_kind.figures()

    def pipeline(self, job: GenerateJob) -> Pipeline:
        from runtimes.torch.generate import ThePipeline

        return ThePipeline(job)

    def _autocast(self) -> AbstractContextManager[None]:
        dtype = getattr(torch, self._settings.compute_dtype)
        enabled = dtype != torch.float32
        return torch.autocast(
            self._device.type,
            dtype if enabled else None,
            enabled=enabled,
            cache_enabled=self._device_kind.autocast_caches_casts,
        )
