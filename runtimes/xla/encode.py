"""Encode pictures and captions on XLA devices: rows shared by all, batches of one size."""

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
    """See models/encoder.py.

    Args:
        batch_size: pictures to which every batch is filled up, so that it is one program, and a
            picture's bits do not depend on what came before.
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
        self._pictures, self._captions = mesh.padded_rows(batch_size), mesh.padded_rows(TEXT_BATCH)

    def images(self, pixels: Float32) -> tuple[Float32, Float32]:
        mean, logvar = super().images(pad_rows(pixels, self._pictures))
        return mean[: len(pixels)], logvar[: len(pixels)]

    def texts(
        self, captions: Sequence[str], clip: Sequence[torch.nn.Module] = ()
    ) -> tuple[Float32, Float32 | None]:
        more = [""] * (self._captions - len(captions))
        states, pooled = super().texts([*captions, *more], clip)
        return states[: len(captions)], None if pooled is None else pooled[: len(captions)]


class CachedEncoder(Encoder):
    """One whose programs are kept."""

    def __init__(self, job: EncodeJob) -> None:
        self._compile_cache = start(job.device, job.compiled)
        vae = None if job.vae is None else Path(job.vae)
        mesh = Mesh(fsdp=1, hosts=1)
        super().__init__(Path(job.model), mesh, job.batch_size, job.dtype, vae)

    def images(self, pixels: Float32) -> tuple[Float32, Float32]:
        found = super().images(pixels)
        self._compile_cache.keep()
        return found


def open_encoder(job: EncodeJob) -> Encoder:
    """The encoders of a job. Raises WrongInput."""
    return CachedEncoder(job)
