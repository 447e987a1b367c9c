"""The PyTorch runtime: trains diffusers denoisers on CPU, CUDA, Ascend and Gaudi."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile, tensorboard_trace_handler

from configs.settings.train import Train
from runtimes.base_runtime import BaseRuntime
from runtimes.contract import Owners, SavedState, State, StepBatch
from runtimes.pipeline_folder.folder import Base
from runtimes.process.collectives import HostCollectives
from runtimes.process.job import TrainJob
from runtimes.process.launcher import Ranks
from runtimes.registry import check_family
from runtimes.torch import device
from runtimes.torch.kernels import compile_denoiser, enable_npu_attention, load_attention
from runtimes.torch.parallel import open_parallel
from runtimes.torch.step import Step, Update, keep_channels_last, memory_format
from runtimes.torch.stream_blocks import stream_blocks
from runtimes.torch_models.activation_memory import Inputs, sender
from runtimes.torch_models.gpu_specs import known_peak
from runtimes.torch_models.loading import trained_scheduler
from runtimes.torch_models.network import FlopCounter, prior_network


class TheRuntime(BaseRuntime):
    """Implements contract.Runtime."""

    def load(self, job: TrainJob, base: Base) -> None:
        self._base = base
        self.versions = device.versions()
        self._prompt_embeds: dict[str, Any] = {}  # of the samples, by untrained text encoders
        settings = self._settings = Train(**job.train)
        ranks = self._ranks = Ranks.here()
        self.samples_collectively = ranks.world > 1 and settings.fsdp != 1
        hooks = self._device_hooks = device.open_device(
            settings.device, ranks, settings.hpu, job.compiled
        )
        self._device = hooks.device
        device.check_on_device(settings, self._device, ranks)
        check_family("torch", base.family.name, self._device.type)
        exact = device.is_deterministic(settings, self._device)
        device.make_deterministic(exact, tf32=settings.allow_tf32)
        load_attention(settings.attention)
        device.warn_of_slow_float32(settings, self._device)
        parallel = open_parallel(settings, ranks, self._device)
        self._collectives = HostCollectives(ranks.world)
        self.device = device.describe(self._device)
        network = self._network = parallel.load(job, base, settings)
        self._counter = FlopCounter(network)
        prior = prior_network(network, settings) if job.has_prior else network
        # Before `place`: these weights never are on the device all at once.
        stream = self._stream = stream_blocks(network, settings.streamed_blocks, self._device)
        layout = memory_format(self._device, sharded=parallel.sharded)
        networks = dict.fromkeys((network, prior))  # one, if it has adapters
        for each in networks:
            if not parallel.sharded:  # FSDP moves it shard by shard
                each.place(self._device, layout)
            if layout == torch.channels_last:
                keep_channels_last(each)
            each.train()
            for part in filter(None, (each.denoiser, each.control)):
                enable_npu_attention(part, self._device)
        hooks.prepare_training(network.denoiser)
        for each in networks:
            for part in filter(None, (each.denoiser, each.control)):
                compile_denoiser(part, settings.compile, hooks, settings.gradient_checkpointing)
        if stream is not None:
            stream.start()
        if prior is not network:
            parallel.wrap_frozen(prior)
        forward = parallel.wrap(network)
        self._update = Update(parallel.masters(), settings, parallel, hooks)
        self._step = Step(
            network, forward, self._update, parallel, hooks, settings, ranks.rank, prior
        )
        hooks.mark_step()

    def put(self, batch: StepBatch) -> StepBatch:
        if not self._device_hooks.prefetches_batches:
            return batch
        return replace(batch, on_device=list(self._step.inputs(batch)))

    def peak_flops(self) -> float | None:
        if self._device.type != "cuda":
            return None
        return known_peak(torch.cuda.get_device_name(self._device), self._settings.product_dtype)

    def state(self, owners: Owners | None = None) -> State:
        self._device_hooks.save_compiled()
        return super().state(owners)

    def restore(self, state: SavedState, step: int) -> None:
        super().restore(state, step)
        self._device_hooks.mark_step()

    def scalars(self) -> dict[str, float]:
        return self._update.scalars()

    def restore_scalars(self, scalars: Mapping[str, float]) -> None:
        self._update.restore_scalars(scalars)

    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        # Not inference_mode: FSDP trains with the tensors that it gathers here.
        with torch.no_grad():
            errors = Inputs(batch, sender(self._device)).errors(self._network)
        return errors.cpu().numpy()

    def memory_bytes(self) -> int:
        return device.peak_bytes(self._device)

    def figures(self) -> dict[str, float]:
        return self._device_hooks.figures()

    def _autocast(self) -> AbstractContextManager[None]:
        return self._step.autocast()

    @contextmanager
    def _trace(self, folder: str) -> Iterator[None]:
        """Trace to `<folder>/<host>_<process>.<time>.pt.trace.json.gz`."""
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        handler = tensorboard_trace_handler(folder, use_gzip=True)
        with profile(activities=activities, record_shapes=True, on_trace_ready=handler):
            yield
            if self._device.type != "cpu":  # kernels of these steps may still be running
                torch.get_device_module(self._device).synchronize(self._device)

    def _open_sampler(self) -> Any:
        from runtimes.torch.sampler import Sampler  # pipelines are slow to import

        self._step.release_graphs()  # sampling needs their memory
        dtype = getattr(torch, self._settings.compute_dtype)
        trained = bool(self._network.text_encoders)
        sampler = Sampler(
            self._base,
            self._network.parts,
            self._device_hooks,
            dtype,
            offload=self._device.type == "cuda",  # beside the state of training
            prompt_embeds=None if trained else self._prompt_embeds,
        )
        sampler.use(self._network, trained_scheduler(self._base, self._settings))
        return sampler
