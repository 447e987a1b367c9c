"""Encode images and captions on the devices of runtime torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from runtimes.data.padding import pad_rows
from runtimes.models.encoder import Encoder, Float32
from runtimes.pipeline_folder.describe import TEXT_BATCH
from runtimes.process.job import EncodeJob
from runtimes.torch.device import make_deterministic, open_device
from runtimes.torch.device_kind import DeviceKind


class PaddedEncoder(Encoder):
    """An encoder that pads every batch to one size and saves the compiled program."""

    def __init__(self, job: EncodeJob, device_kind: DeviceKind, vae: Path | None) -> None:
        super().__init__(Path(job.model), vae, device=device_kind.device, dtype=job.dtype)
        self._device_kind = device_kind
        self._pictures = job.batch_size

    def images(self, pixels: Float32) -> tuple[Float32, Float32]:
        mean, logvar = super().images(pad_rows(pixels, self._pictures))
        self._device_kind.save_compiled()
        return mean[: len(pixels)], logvar[: len(pixels)]

    def texts(
        self, captions: Sequence[str], clip: Sequence[torch.nn.Module] = ()
    ) -> tuple[Float32, Float32 | None]:
        padding = [""] * (TEXT_BATCH - len(captions))
        states, pooled = super().texts([*captions, *padding], clip)
        return states[: len(captions)], None if pooled is None else pooled[: len(captions)]


def open_encoder(job: EncodeJob) -> Encoder:
    """Open the encoders of a job. Raises WrongInput."""
    make_deterministic()  # a rebuilt shard must have identical bytes
    vae = None if job.vae is None else Path(job.vae)
    device_kind = open_device(job.device, compiled=job.compiled)
    if device_kind.pads_batches:
        return PaddedEncoder(job, device_kind, vae)
    return Encoder(Path(job.model), vae, device=device_kind.device, dtype=job.dtype)
