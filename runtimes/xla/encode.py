"""Encode images and captions on XLA devices, in padded batches sharded over all devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch_xla

from runtimes.data.padding import pad_rows
from runtimes.models import encoder
from runtimes.models.encoder import Float32
from runtimes.pipeline_folder.describe import TEXT_BATCH
from runtimes.process.job import EncodeJob
from runtimes.xla.device import start
from runtimes.xla.graph import replace_nearest_upsampling
from runtimes.xla.mesh import Mesh


class Encoder(encoder.Encoder):
    """The encoder of models/encoder.py on XLA devices.

    Args:
        folder: local diffusers pipeline folder.
        mesh: devices that share the rows of a batch.
        batch_size: images to which every batch is padded. All batches then run one program, so the
            bits of an image do not depend on the size of its batch.
        dtype: of the weights.
        vae: folder of an AutoencoderKL that replaces the pipeline's VAE.
    """

    def __init__(
        self, folder: Path, mesh: Mesh, batch_size: int, dtype: str, vae: Path | None
    ) -> None:
        super().__init__(
            folder,
            vae,
            device=torch_xla.device(),
            dtype=dtype,
            send=mesh.shard_rows,
            fetch=mesh.fetch_rows,
        )
        replace_nearest_upsampling(self.vae)
        self._pictures = mesh.padded_rows(batch_size)
        self._captions = mesh.padded_rows(TEXT_BATCH)

    def images(self, pixels: Float32) -> tuple[Float32, Float32]:
        mean, logvar = super().images(pad_rows(pixels, self._pictures))
        return mean[: len(pixels)], logvar[: len(pixels)]

    def texts(
        self, captions: Sequence[str], clip: Sequence[torch.nn.Module] = ()
    ) -> tuple[Float32, Float32 | None]:
        padding = [""] * (self._captions - len(captions))
        states, pooled = super().texts([*captions, *padding], clip)
        return states[: len(captions)], None if pooled is None else pooled[: len(captions)]


class CachedEncoder(Encoder):
    """An encoder that saves its compiled programs to the cache."""

    def __init__(self, job: EncodeJob) -> None:
        self._compile_cache = start(job.device, job.compiled)
        vae = None if job.vae is None else Path(job.vae)
        mesh = Mesh(fsdp=1, hosts=1)
        super().__init__(Path(job.model), mesh, job.batch_size, job.dtype, vae)

    def images(self, pixels: Float32) -> tuple[Float32, Float32]:
        moments = super().images(pixels)
        self._compile_cache.upload()
        return moments


def open_encoder(job: EncodeJob) -> Encoder:
    """Open the encoders of a job. Raises WrongInput."""
    return CachedEncoder(job)
