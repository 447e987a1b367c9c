"""Encode pictures and captions on the devices of runtime torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from runtimes.data.padding import repeat_last
from runtimes.models.encoder import Encoder, Float32
from runtimes.pipeline_folder.describe import TEXT_BATCH
from runtimes.process.job import EncodeJob
from runtimes.torch.device import make_deterministic, open_chip
from runtimes.torch.device_kind import Chip


class FilledEncoder(Encoder):
    """One that fills batches up to one size, so that they are one program, which is kept."""

    def __init__(self, job: EncodeJob, chip: Chip, vae: Path | None) -> None:
        super().__init__(Path(job.model), vae, device=chip.device, dtype=job.dtype)
        self._chip, self._pictures = chip, job.batch_size

    def images(self, pixels: Float32) -> tuple[Float32, Float32]:
        mean, logvar = super().images(repeat_last(pixels, self._pictures))
        self._chip.keep()
        return mean[: len(pixels)], logvar[: len(pixels)]

    def texts(
        self, captions: Sequence[str], clip: Sequence[torch.nn.Module] = ()
    ) -> tuple[Float32, Float32 | None]:
        more = [""] * (TEXT_BATCH - len(captions))
        states, pooled = super().texts([*captions, *more], clip)
        return states[: len(captions)], None if pooled is None else pooled[: len(captions)]


def open_encoder(job: EncodeJob) -> Encoder:
    """The encoders of a job. Raises WrongInput."""
    make_deterministic()  # a rebuilt shard must have the bytes it had
    vae = None if job.vae is None else Path(job.vae)
    chip = open_chip(job.device, compiled=job.compiled)
    if chip.fills_batches:
        return FilledEncoder(job, chip, vae)
    return Encoder(Path(job.model), vae, device=chip.device, dtype=job.dtype)
