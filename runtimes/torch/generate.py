"""Sample images with a diffusers pipeline, for a sequence of models."""

from __future__ import annotations

import logging

import numpy as np
import torch
from numpy.typing import NDArray

from runtimes.check_support import check_family
from runtimes.contract import StepBatch
from runtimes.families import detect_family
from runtimes.process.job import Drawing, GenerateJob
from runtimes.sample.base_pipeline import BasePipeline
from runtimes.sample.load_network import load_network
from runtimes.torch.device import describe, free_memory, make_deterministic, open_device
from runtimes.torch.npu import enable_npu_attention
from runtimes.torch.offload import OFFLOADING, offload_layers
from runtimes.torch.sampler import Sampler
from runtimes.torch_models.make_scheduler import make_scheduler
from runtimes.torch_models.micro_batches import Inputs, sender
from runtimes.torch_models.network import Network

log = logging.getLogger("kiln")


class ThePipeline(BasePipeline):
    """Implements contract.Pipeline."""

    def __init__(self, job: GenerateJob) -> None:
        make_deterministic()
        self._device_hooks = open_device(job.device, compiled=job.compiled)
        self._device = self._device_hooks.device
        check_family("torch", detect_family(job.model_folder).name, self._device.type)
        self._dtype = getattr(torch, job.dtype)
        self._offload = job.offload and self._device.type in OFFLOADING
        if job.offload and self._device.type != "cuda":  # `auto` may have chosen another device
            log.warning("offload has no effect on %s", describe(self._device))
        super().__init__(job, make_scheduler, self._device_hooks.save_compiled)

    def _release(self) -> None:
        super()._release()
        free_memory()  # compiled and hooked modules refer to themselves

    def _load_network(self, drawing: Drawing) -> Network:
        job = self._job
        place = torch.device("cpu") if self._offload else self._device
        given = (self._dtype, place, job.text_dtype)
        network = load_network(drawing, job.model_folder, *given)
        if self._offload:
            for part in network.parts.values():
                offload_layers(part, self._device)
            network.frozen_clip.to(self._device)
        enable_npu_attention(network.denoiser, self._device)
        self._device_hooks.prepare_sampling(network.denoiser)
        return network

    def _open_sampler(self) -> Sampler:
        # The sampler loads its own text encoders: the next model may not have trained ones.
        denoiser = {self._network.family.denoiser: self._network.denoiser}
        job = self._job
        given = (self._device_hooks, self._dtype, job.vae_folder)
        return Sampler(job.model_folder, denoiser, *given, offload=self._offload)

    def _use_network(self) -> None:
        self._sampler.use(self._network.parts, self._scheduler)

    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        with torch.inference_mode():
            inputs = Inputs(batch, sender(self._device), dtype=self._dtype)
            return inputs.errors(self._network).cpu().numpy()

    def compile_seconds(self) -> float:
        return self._device_hooks.compile_seconds()
