"""Sampling with one compiled program for every step of every batch.

The scheduler's coefficients are inputs of the program (sample/tabulated_schedulers.py), and batches
are padded to one size. No value is read back before the images are complete.

`ThePipeline` samples images and computes held-out losses for a sequence of models. The encoder's
batches of images and captions are padded, and sharded over all devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch_xla
from numpy.typing import NDArray

from runtimes.contract import UNCAST, StepBatch
from runtimes.data.loader import pad_batch, padded_rows
from runtimes.pipeline_folder.folder import TEXT_BATCH, Base
from runtimes.process.job import Drawing, EncodeJob, GenerateJob
from runtimes.process.launcher import Ranks
from runtimes.sample.diffusers_pipeline import BasePipeline
from runtimes.sample.sampling_inputs import (
    NO_REFERENCES,
    ConditionedNoise,
    Conditioner,
    References,
    image_levels,
)
from runtimes.sample.tabulated_schedulers import SchedulerTable, scheduler_step
from runtimes.torch_models.activation_memory import Inputs
from runtimes.torch_models.loading import make_scheduler
from runtimes.torch_models.network import Network, load_network
from runtimes.torch_models.vae_text_encoders import Embeds, PaddedEncoder
from runtimes.xla.device import compile_seconds, start
from runtimes.xla.mesh import Mesh


def sharded_encoder(mesh: Mesh, batch_size: int, base: Base, **more: Any) -> PaddedEncoder:
    """A PaddedEncoder whose batches are sharded over the devices of `mesh`.

    Args:
        batch_size: images to which every batch is padded.
        base: the pipeline.
        more: as PaddedEncoder.
    """
    return PaddedEncoder(
        base,
        images=padded_rows(batch_size, mesh.local),
        captions=padded_rows(TEXT_BATCH, mesh.local),
        device=torch_xla.device(),
        send=mesh.shard_rows,
        fetch=mesh.fetch_rows,
        **more,
    )


def open_encoder(job: EncodeJob) -> PaddedEncoder:
    """Open the encoders of a job. Raises Refused."""
    upload = start(job.device, job.compiled).upload
    mesh = Mesh(fsdp=1, hosts=1)
    more = {"dtype": job.dtype, "save_compiled": upload, "embeds": job.embeds}
    return sharded_encoder(mesh, job.batch_size, Base.of(job), **more)


Float32 = NDArray[np.float32]


class Sampler:
    """Samples images with a network and a pipeline's encoders, VAE and scheduler.

    Args:
        base: the pipeline.
        mesh: devices that share the rows of a batch.
        dtype: dtype of the encoders, the VAE and the denoiser's inputs.

    Raises:
        Refused: a component is missing or cannot be loaded.
    """

    def __init__(self, base: Base, mesh: Mesh, dtype: str = "float32") -> None:
        self._mesh = mesh
        self._dtype = getattr(torch, dtype)
        self._encoder = sharded_encoder(mesh, 1, base, dtype=dtype)
        self._conditioner = Conditioner(self._encoder.info, self._texts, self._encoder.images)
        self._pipeline_scheduler = make_scheduler(base.scheduler)

    def use(self, network: Network, scheduler: Any = None) -> None:
        """Set the network, and its scheduler; None selects the pipeline's scheduler."""
        self._network: Any = network
        self._scheduler = self._pipeline_scheduler if scheduler is None else scheduler

    def release_network(self) -> None:
        """Drop the reference to the network, to free its memory."""
        self._network = None

    def draw(
        self,
        prompts: Sequence[str],
        sampler: dict[str, Any],
        *,
        first: int,
        references: References = NO_REFERENCES,
    ) -> NDArray[np.uint8]:
        """As `PipelineSampler.draw`: images [N, H, W, 3] uint8, one per prompt."""
        return image_levels(self.pixels(prompts, sampler, first=first, references=references))

    def encode_picture(self, pixels: Float32) -> Float32:
        """As `PipelineSampler.encode_picture`."""
        return self._encoder.images(pixels)[0]

    @torch.no_grad()
    def pixels(
        self,
        prompts: Sequence[str],
        sampler: dict[str, Any],
        *,
        first: int,
        references: References = NO_REFERENCES,
    ) -> Float32:
        """Images [N, H, W, 3] f32 in 0..1; the arguments are those of `draw`."""
        guidance = self._network.family.guidance_weight(sampler)
        config = self._network.denoiser.config
        table = self._conditioner.table(self._scheduler, sampler, config)
        options: dict[str, Any] = {"denoiser": config, "multiple": self._mesh.local}
        options |= {"first": first, "references": references}
        batches = self._conditioner.batches(prompts, sampler, **options)
        pictures = [self._denoise(batch, table, guidance)[: batch.count] for batch in batches]
        return np.concatenate(pictures)

    def _texts(self, captions: list[str]) -> tuple[Embeds, Float32 | None]:
        return self._encoder.texts(captions, self._network.text_encoders)

    def _denoise(self, batch: ConditionedNoise, table: SchedulerTable, guidance: float) -> Float32:
        """Images [B, H, W, 3] f32 in 0..1 of one batch, padding included."""
        sent = {name: self._mesh.shard_rows(rows) for name, rows in batch.conditioning.items()}
        conditioning = {n: t if n in UNCAST else t.to(self._dtype) for n, t in sent.items()}
        del sent  # else the devices hold both precisions until the pictures are decoded
        latents = self._mesh.shard_rows(batch.noise) * table.start
        previous = torch.zeros_like(latents)
        for timestep, row in zip(table.timesteps, table.rows, strict=True):
            numbers = torch.tensor([timestep, *row, guidance]).to(latents.device)
            latents, previous = self._step(latents, previous, conditioning, numbers)
            torch_xla.sync()
        pixels = (self._encoder.decode(latents) / 2 + 0.5).clamp(0, 1)
        return self._mesh.fetch_rows(pixels).numpy().transpose(0, 2, 3, 1)

    def _step(
        self,
        latents: torch.Tensor,
        previous: torch.Tensor,
        conditioning: dict[str, torch.Tensor],
        numbers: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One sampling step.

        Args:
            latents: noisy latents [B, C, h, w] f32.
            previous: predicted original of the previous step [B, C, h, w] f32.
            conditioning: keyword to [B, ...] or, with guidance, [2 B, ...].
            numbers: [8] f32, the timestep, the 6 StepCoefficients, the weight of guidance.

        Returns:
            The next latents and the predicted original, both [B, C, h, w] f32.
        """
        timestep, *row, weight = numbers.unbind()
        guided = len(conditioning["prompt_embeds"]) > len(latents)
        inputs = (latents * row[0]).to(self._dtype)
        if guided:
            inputs = inputs.repeat_interleave(2, dim=0)
        output = self._network(inputs, timestep.expand(len(inputs)), conditioning).float()
        if guided:
            unconditional, conditional = output.unflatten(0, (-1, 2)).unbind(1)
            output = self._network.family.guide(unconditional, conditional, weight)
        return scheduler_step(latents, previous, output, row)


class ThePipeline(BasePipeline):
    """Implements contract.Pipeline."""

    def __init__(self, job: GenerateJob, base: Base) -> None:
        super().__init__(job, base, make_scheduler, start(job.device, job.compiled).upload)
        self._dtype = getattr(torch, job.dtype)
        self._mesh = Mesh(fsdp=1, hosts=Ranks.here().world)

    def _load_network(self, drawing: Drawing) -> Network:
        host = torch.device("cpu")
        network = load_network(drawing, self._base, self._dtype, host, self._job.text_dtype)
        self._mesh.shard_module(network)
        return network

    def _open_sampler(self) -> Sampler:
        return Sampler(self._base, self._mesh, self._job.dtype)

    @torch.no_grad()
    def errors(self, batch: StepBatch) -> NDArray[np.float32]:
        padded = pad_batch(batch, self._loss_rows, self._mesh.local)
        inputs = Inputs(padded, self._mesh.shard_rows, dtype=self._dtype)
        errors = self._mesh.fetch_rows(inputs.errors(self._network)).numpy()
        return errors[: len(batch.timesteps)]

    def compile_seconds(self) -> float:
        return compile_seconds()
