"""Sample images with a diffusers pipeline, for a sequence of models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from runtimes.contract import StepBatch
from runtimes.models.micro_batches import Inputs, sender
from runtimes.models.schedulers import make_scheduler
from runtimes.process.job import Drawing, GenerateJob
from runtimes.sample.network import load_network
from runtimes.sample.start import load_trained_scheduler
from runtimes.torch.device import make_deterministic, open_device
from runtimes.torch.npu import enable_npu_attention
from runtimes.torch.sampler import Sampler


class ThePipeline:
    """Implements contract.Pipeline."""

    def __init__(self, job: GenerateJob) -> None:
        make_deterministic()
        self._device_kind = open_device(job.device, compiled=job.compiled)
        self._device = self._device_kind.device
        self._dtype = getattr(torch, job.dtype)
        self._model = Path(job.model)
        self._settings = job.sampler
        self._vae = None if job.vae is None else Path(job.vae)
        self._sampler: Sampler | None = None

    def load(self, drawing: Drawing) -> None:
        self._network = load_network(drawing, self._model, self._dtype, self._device)
        enable_npu_attention(self._network.denoiser, self._device)
        self._device_kind.prepare_sampling(self._network.denoiser)
        self._scheduler = load_trained_scheduler(drawing, make_scheduler)
        self.encodes_text = bool(self._network.text_encoders)

    def draw(self, prompts: Sequence[str], first: int) -> NDArray[np.uint8]:
        # The sampler loads its own text encoders: the next model may not have trained ones.
        if self._sampler is None:
            denoiser = {self._network.family.denoiser: self._network.denoiser}
            self._sampler = Sampler(
                self._model, denoiser, self._device_kind, self._dtype, self._vae
            )
        trained = {} if self._scheduler is None else {"scheduler": self._scheduler}
        self._sampler.use(dict(self._network.named_children()) | trained)
        drawn = self._sampler.draw(prompts, self._settings, first=first)
        self._device_kind.save_compiled()
        return drawn

    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        with torch.inference_mode():
            inputs = Inputs(batch, sender(self._device), dtype=self._dtype)
            return inputs.errors(self._network).cpu().numpy()

    def compile_seconds(self) -> float:
        return self._device_kind.compile_seconds()
