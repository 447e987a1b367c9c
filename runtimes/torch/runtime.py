"""The PyTorch runtime: forward, backward and update of a diffusers UNet on a CPU or CUDA device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from configs.schema import Train
from runtimes.base import State, StepBatch, StepOutput
from runtimes.events import Events
from runtimes.families import Family, detect_family
from runtimes.job import GenerateJob, TrainJob
from runtimes.torch.device import (
    choose_device,
    describe,
    make_deterministic,
    peak_bytes,
    probe,
    versions,
)
from runtimes.torch.models import load_unet
from runtimes.torch.update import Update

__all__ = ["TheRuntime", "probe"]


class TheRuntime:
    """See base.Runtime for what each method promises."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.versions = versions()
        self._sampler: Any = None  # generate.Sampler, once a sample is asked for

    def load(self, job: TrainJob) -> None:
        self._job, self._settings = job, Train(**job.train)
        make_deterministic()
        self._device = choose_device(self._settings.device)
        self.device = describe(self._device)
        self._family = detect_family(Path(job.model))
        unet: torch.nn.Module = load_unet(Path(job.model) / "unet")
        unet.to(self._device, memory_format=torch.channels_last)
        self._unet: Any = unet.train()
        if self._settings.gradient_checkpointing:
            self._unet.enable_gradient_checkpointing()
        self._forward = torch.compile(self._unet) if self._settings.compile else self._unet
        self._update = Update(dict(self._unet.named_parameters()), self._settings)

    def step(self, batch: StepBatch, learning_rate: float) -> StepOutput:
        size = len(batch.timesteps)
        micro = self._settings.micro_batch_size or size
        loss = torch.zeros((), device=self._device)
        for start in range(0, size, micro):
            inputs = Inputs(batch, slice(start, start + micro), self._device)
            with self._autocast():
                errors = inputs.errors(self._forward, self._family)
            part = (inputs.weight * errors).sum() / batch.denominator
            part.backward()
            loss += part.detach()
        return StepOutput(loss, self._update.apply(learning_rate))

    def state(self) -> State:
        return self._update.state()

    def restore(self, state: State, step: int) -> None:
        self._update.restore(state, step)

    def sample(self, prompts: Sequence[str], sampler: dict[str, Any]) -> NDArray[np.uint8]:
        from runtimes.torch.generate import Sampler  # pipelines are slow to import

        if self._sampler is None:
            vae = None if self._job.vae is None else Path(self._job.vae)
            model = Path(self._job.model)
            self._sampler = Sampler(model, self._unet, self._device, vae=vae)
        self._unet.eval()
        try:
            with self._update.averaged(), self._autocast():
                pictures = self._sampler.draw(prompts, sampler, first=0)
        finally:
            self._unet.train()
        return np.stack([np.asarray(picture) for picture in pictures])

    def memory_bytes(self) -> int:
        return peak_bytes(self._device)

    def generate(self, job: GenerateJob) -> None:
        from runtimes.torch.generate import generate

        generate(job, self._events)

    def _autocast(self) -> AbstractContextManager[None]:
        dtype = getattr(torch, self._settings.compute_dtype)
        enabled = dtype != torch.float32
        return torch.autocast(self._device.type, dtype if enabled else None, enabled=enabled)


class Inputs:
    """A slice of a batch on the device."""

    def __init__(
        self,
        batch: StepBatch,
        part: slice,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        def put(array: NDArray[Any]) -> torch.Tensor:
            tensor = torch.from_numpy(array[part])
            if device.type == "cuda":
                tensor = tensor.pin_memory()
            return tensor.to(device, non_blocking=True)

        self.noisy_latents = put(batch.noisy_latents).to(dtype)
        self.timesteps = put(batch.timesteps)
        self.target, self.weight = put(batch.target), put(batch.weight)
        # Sizes stay float32: half precision loses integers above 2048.
        self.conditioning = {
            name: put(array).to(torch.float32 if name == "add_time_ids" else dtype)
            for name, array in batch.conditioning.items()
        }

    def errors(self, unet: Any, family: Family) -> torch.Tensor:
        """Mean squared error of each sample [B], in float32."""
        arguments = family.arguments(self.conditioning)
        prediction = unet(self.noisy_latents, self.timesteps, **arguments, return_dict=False)[0]
        return (prediction.float() - self.target).square().mean(dim=(1, 2, 3))
