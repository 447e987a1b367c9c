"""Sampling with one computation for every step of every batch.

The scheduler's numbers are data (sample/tabulated_scheduler.py), batches are padded to one
size, and nothing is read back before the pictures are done: the program of the first batch serves
all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_xla
from numpy.typing import NDArray

from runtimes.contract import EXACT
from runtimes.models.network import Network
from runtimes.models.schedulers import make_scheduler
from runtimes.objective.noise_scheduler import read_config
from runtimes.sample.conditioning import ConditionedNoise, Conditioner, is_guided, sampler_table
from runtimes.sample.tabulated_scheduler import Table
from runtimes.xla.encode import Encoder
from runtimes.xla.mesh import Mesh

Conditioning = dict[str, torch.Tensor]
Float32 = NDArray[np.float32]


class Sampler:
    """A pipeline's encoders, VAE and scheduler around a network.

    Raises:
        WrongInput: a part of the pipeline is missing or does not load.
    """

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        dtype: str = "float32",
        vae: Path | None = None,
    ) -> None:
        self._mesh, self._dtype = mesh, getattr(torch, dtype)
        self._encoder = Encoder(folder, mesh, 1, dtype, vae)
        self._conditioner = Conditioner(self._encoder.info, self._texts, self._encoder.images)
        self._pipeline_scheduler = make_scheduler(read_config(folder / "scheduler"))

    def use(self, network: Network, scheduler: Any = None) -> None:
        """Draw with a network from now on, and with its scheduler if it has one of its own."""
        self._network: Any = network
        self._scheduler = self._pipeline_scheduler if scheduler is None else scheduler

    def release_network(self) -> None:
        """Let go of the network."""
        self._network = None

    def draw(
        self, prompts: Sequence[str], sampler: dict[str, Any], *, first: int
    ) -> NDArray[np.uint8]:
        """Pictures [N, H, W, 3], `batch_size` at a time; the first one's noise is number `first`.

        `sampler` is as in GenerateJob.
        """
        return (self.pixels(prompts, sampler, first=first) * 255).round().astype(np.uint8)

    @torch.no_grad()
    def pixels(self, prompts: Sequence[str], sampler: dict[str, Any], *, first: int) -> Float32:
        """As `draw`, in 0 to 1."""
        family, guidance = self._network.family, sampler["guidance_scale"]
        table, guided = sampler_table(self._scheduler, sampler, family), is_guided(family, sampler)
        starts = self._conditioner.batches(
            prompts,
            sampler,
            first=first,
            denoiser=self._network.denoiser.config,
            multiple=self._mesh.local,
        )
        pictures = list[Float32]()
        for start in starts:
            pictures += list(self._denoise(start, table, guidance, guided)[: start.count])
        return np.stack(pictures)

    def _texts(self, captions: list[str]) -> tuple[Float32, Float32 | None]:
        return self._encoder.texts(captions, self._network.text_encoders)

    def _sent(self, name: str, array: Float32) -> torch.Tensor:
        """Sizes stay as they are: half precision loses integers above 2048."""
        sent = self._mesh.shard_rows(array)
        return sent if name in EXACT else sent.to(self._dtype)

    def _denoise(
        self, start: ConditionedNoise, table: Table, guidance: float, guided: bool
    ) -> Float32:
        """Pictures [B, H, W, 3] in 0 to 1."""
        conditioning = {name: self._sent(name, array) for name, array in start.conditioning.items()}
        latents = self._mesh.shard_rows(start.noise) * table.start
        before = torch.zeros_like(latents)
        for timestep, row in zip(table.timesteps, table.rows, strict=True):
            numbers = torch.tensor([timestep, *row, guidance]).to(latents.device)
            latents, before = self._step(latents, before, conditioning, numbers, guided)
            torch_xla.sync()
        pixels = (self._encoder.decode(latents) / 2 + 0.5).clamp(0, 1)
        return self._mesh.fetch_rows(pixels).numpy().transpose(0, 2, 3, 1)

    def _step(
        self,
        latents: torch.Tensor,
        before: torch.Tensor,
        conditioning: Conditioning,
        numbers: torch.Tensor,
        guided: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        t, scale, x0_x, x0_m, next_x, next_x0, next_before, guidance = numbers.unbind()
        inputs = (latents * scale).to(self._dtype)
        if guided:
            inputs = inputs.repeat_interleave(2, dim=0)
        found = self._network(inputs, t.expand(len(inputs)), conditioning).float()
        if guided:
            without, found = found.unflatten(0, (-1, 2)).unbind(1)
            found = without + guidance * (found - without)
        foreseen = x0_x * latents + x0_m * found
        return next_x * latents + next_x0 * foreseen + next_before * before, foreseen
