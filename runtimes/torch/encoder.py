"""Encode images and captions on the devices of runtime torch."""

from __future__ import annotations

from runtimes.pipeline_folder.describe_encoders import TEXT_BATCH
from runtimes.process.job import EncodeJob
from runtimes.torch.device import make_deterministic, open_device
from runtimes.torch_models.encode_images_and_captions import Encoder, PaddedEncoder


def open_encoder(job: EncodeJob) -> Encoder:
    """Open the encoders of a job. Raises WrongInput."""
    make_deterministic()  # a rebuilt shard must have identical bytes
    hooks = open_device(job.device, compiled=job.compiled)
    folders = (job.model_folder, job.vae_folder)
    if not hooks.pads_batches:
        return Encoder(*folders, device=hooks.device, dtype=job.dtype, embeds=job.embeds)
    return PaddedEncoder(
        *folders,
        images=job.batch_size,
        captions=TEXT_BATCH,
        save_compiled=hooks.save_compiled,
        device=hooks.device,
        dtype=job.dtype,
        embeds=job.embeds,
    )
