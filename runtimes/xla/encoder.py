"""Encode images and captions on XLA devices, in padded batches sharded over all devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch_xla

from runtimes.pipeline_folder.describe_encoders import TEXT_BATCH
from runtimes.process.job import EncodeJob
from runtimes.torch_models.encode_images_and_captions import PaddedEncoder
from runtimes.xla.device import start
from runtimes.xla.mesh import Mesh


class Encoder(PaddedEncoder):
    """The encoder of torch_models/encode_images_and_captions.py on XLA devices.

    Args:
        folder: local diffusers pipeline folder.
        mesh: devices that share the rows of a batch.
        batch_size: images to which every batch is padded.
        dtype: of the weights.
        vae: folder of an AutoencoderKL that replaces the pipeline's VAE.
        save_compiled: saves newly compiled programs to the cache.
        embeds: as encode_images_and_captions.Encoder.
    """

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        batch_size: int,
        dtype: str,
        vae: Path | None,
        save_compiled: Callable[[], None] = lambda: None,
        *,
        embeds: bool = True,
    ) -> None:
        super().__init__(
            folder,
            vae,
            images=mesh.padded_rows(batch_size),
            captions=mesh.padded_rows(TEXT_BATCH),
            save_compiled=save_compiled,
            device=torch_xla.device(),
            dtype=dtype,
            send=mesh.shard_rows,
            fetch=mesh.fetch_rows,
            embeds=embeds,
        )


def open_encoder(job: EncodeJob) -> Encoder:
    """Open the encoders of a job. Raises WrongInput."""
    upload, mesh = start(job.device, job.compiled).upload, Mesh(fsdp=1, hosts=1)
    given = (job.model_folder, mesh, job.batch_size, job.dtype, job.vae_folder, upload)
    return Encoder(*given, embeds=job.embeds)
