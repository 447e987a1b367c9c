"""Encode images and captions on XLA devices, in padded batches sharded over all devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch_xla

from runtimes.pipeline_folder.describe_encoders import TEXT_BATCH
from runtimes.process.job import EncodeJob
from runtimes.torch_models.encode_images_and_captions import PaddedEncoder
from runtimes.xla.device import start
from runtimes.xla.mesh import Mesh


def sharded_encoder(
    mesh: Mesh, batch_size: int, folder: Path, vae: Path | None, **more: Any
) -> PaddedEncoder:
    """A PaddedEncoder whose batches are sharded over the devices of `mesh`.

    Args:
        batch_size: images to which every batch is padded.
        folder: local diffusers pipeline folder.
        vae: folder of an AutoencoderKL that replaces the pipeline's VAE.
        more: as PaddedEncoder.
    """
    return PaddedEncoder(
        folder,
        vae,
        images=mesh.padded_rows(batch_size),
        captions=mesh.padded_rows(TEXT_BATCH),
        device=torch_xla.device(),
        send=mesh.shard_rows,
        fetch=mesh.fetch_rows,
        **more,
    )


def open_encoder(job: EncodeJob) -> PaddedEncoder:
    """Open the encoders of a job. Raises WrongInput."""
    upload, mesh = start(job.device, job.compiled).upload, Mesh(fsdp=1, hosts=1)
    more = {"dtype": job.dtype, "save_compiled": upload, "embeds": job.embeds}
    return sharded_encoder(mesh, job.batch_size, job.model_folder, job.vae_folder, **more)
