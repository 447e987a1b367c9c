"""The PyTorch runtime: forward, backward and update of a diffusers denoiser on CPU or CUDA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from configs.training import Train
from runtimes.base import State, StepBatch, StepOutput
from runtimes.events import Events
from runtimes.job import GenerateJob, TrainJob
from runtimes.torch.device import (
    choose_device,
    describe,
    make_deterministic,
    peak_bytes,
    probe,
    versions,
)
from runtimes.torch.network import Network
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
        network = Network.load(job, self._settings)
        network.to(self._device, memory_format=torch.channels_last)
        self._network = network.train()
        self._forward: Any = network
        if self._settings.compile:
            self._forward = torch.compile(network)
        self._update = Update(network.trained(), self._settings)

    def step(self, batch: StepBatch, learning_rate: float) -> StepOutput:
        size = len(batch.timesteps)
        micro = self._settings.micro_batch_size or size
        loss = torch.zeros((), device=self._device)
        for start in range(0, size, micro):
            inputs = Inputs(batch, slice(start, start + micro), self._device)
            with self._autocast():
                errors = inputs.errors(self._forward)
            part = (inputs.weight * errors).sum() / batch.denominator
            part.backward()
            loss += part.detach()
        return StepOutput(loss, self._update.apply(learning_rate))

    def flops(self, batch: StepBatch) -> float | None:
        return None

    def peak_flops(self) -> float | None:
        return None

    def any_rank(self, flag: bool) -> bool:
        return flag

    def state(self) -> State:
        return self._update.state()

    def restore(self, state: State, step: int) -> None:
        self._update.restore(state, step)

    def sample(self, prompts: Sequence[str], sampler: dict[str, Any]) -> NDArray[np.uint8]:
        from runtimes.torch.generate import Sampler  # pipelines are slow to import

        if self._sampler is None:
            vae = None if self._job.vae is None else Path(self._job.vae)
            parts = dict(self._network.named_children())
            self._sampler = Sampler(Path(self._job.model), parts, self._device, vae=vae)
        with self._evaluating():
            pictures = self._sampler.draw(prompts, sampler, first=0)
        return np.stack([np.asarray(picture) for picture in pictures])

    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        with self._evaluating(), torch.inference_mode():
            errors = Inputs(batch, slice(None), self._device).errors(self._network)
        return errors.cpu().numpy()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Within, the network has its average, if one is kept, and drops nothing."""
        self._network.eval()
        try:
            with self._update.averaged(), self._autocast():
                yield
        finally:
            self._network.train()

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

    def errors(self, network: Any) -> torch.Tensor:
        """Mean squared error of each sample [B], in float32."""
        prediction = network(self.noisy_latents, self.timesteps, self.conditioning)
        return (prediction.float() - self.target).square().mean(dim=(1, 2, 3))
