"""Sampling with one computation for every step of every batch.

The scheduler's numbers are data (runtimes/torch/solver.py), batches are padded to one size, and
nothing is read back before the pictures are done: what is compiled for the first batch serves all.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_xla
from numpy.typing import NDArray

from runtimes.encoders import describe_encoders
from runtimes.families import detect_family
from runtimes.objective.draws import Stream, generator
from runtimes.objective.scheduler import read_config
from runtimes.torch.network import Network
from runtimes.torch.schedulers import chosen, make_scheduler
from runtimes.torch.solver import Table, tabulate
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
        self._family, self._mesh = detect_family(folder), mesh
        self._info, self._dtype = describe_encoders(folder, vae), getattr(torch, dtype)
        self._encoder = Encoder(folder, mesh, 1, dtype, vae)
        self._own_scheduler = make_scheduler(read_config(folder / "scheduler"))

    def use(self, network: Network, scheduler: Any = None) -> None:
        """Draw with a network from now on, and with its scheduler if it has one of its own."""
        self._network: Any = network
        self._scheduler = self._own_scheduler if scheduler is None else scheduler

    def leave(self) -> None:
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
        config, factor = self._network.denoiser.config, self._info["vae_scale_factor"]
        height, width = (
            sampler.get(side) or config.sample_size * factor for side in ("height", "width")
        )
        shape = (self._info["latent_channels"], height // factor, width // factor)
        size, whole = sampler["batch_size"], self._mesh.whole(sampler["batch_size"])
        table = tabulate(chosen(self._scheduler, sampler), sampler["num_inference_steps"])
        pictures = list[Float32]()
        for start in range(0, len(prompts), size):
            part = list(prompts[start : start + size])
            numbers = range(first + start, first + start + len(part))
            noise = np.zeros((whole, *shape), np.float32)
            for row, number in zip(noise, numbers, strict=False):
                rng = generator(sampler["seed"], Stream.PICTURE, number)
                rng.standard_normal(out=row, dtype=np.float32)
            padded = part + [part[-1]] * (whole - len(part))
            conditioning = self._condition(padded, (height, width), sampler["guidance_scale"])
            drawn = self._denoise(noise, conditioning, table, sampler["guidance_scale"])
            pictures += list(drawn[: len(part)])
        return np.stack(pictures)

    def _condition(
        self, captions: list[str], size: tuple[int, int], guidance: float
    ) -> Conditioning:
        """Of every picture, without its caption and with it, one below the other [2 B, ...]."""
        given, pooled = self._texts(captions)
        arrays: dict[str, NDArray[Any]] = {"prompt_embeds": given}
        if pooled is not None:
            arrays["pooled_prompt_embeds"] = pooled
        if guidance > 1:
            arrays = {n: _below(*pair) for n, pair in self._pairs(arrays).items()}
        if self._family.name == "sdxl":
            ids = np.array([*size, 0, 0, *size], np.float32)
            arrays["add_time_ids"] = np.tile(ids, (len(arrays["prompt_embeds"]), 1))
        put = self._mesh.put_rows
        return {
            name: put(array) if name == "add_time_ids" else put(array).to(self._dtype)
            for name, array in arrays.items()
        }

    def _pairs(
        self, arrays: dict[str, NDArray[Any]]
    ) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
        if self._info["empty_prompt"] == "zeros":
            return {name: (np.zeros_like(array), array) for name, array in arrays.items()}
        count = len(arrays["prompt_embeds"])
        without = dict(zip(arrays, self._texts([""] * count), strict=False))
        return {name: (without[name], array) for name, array in arrays.items()}  # type: ignore[misc]

    def _texts(self, captions: list[str]) -> tuple[Float32, Float32 | None]:
        """Prompt embeddings [B, T, D] and pooled ones [B, P]."""
        states, pooled = self._encoder.texts(captions, self._network.text_encoders)
        tokens, width = self._info["tokens"], self._info["prompt_dim"]
        missing = ((0, 0), (0, tokens - states.shape[1]), (0, width - states.shape[2]))
        return np.pad(states, missing), pooled

    def _denoise(
        self, noise: Float32, conditioning: Conditioning, table: Table, guidance: float
    ) -> Float32:
        """Pictures [B, H, W, 3] in 0 to 1."""
        latents = self._mesh.put_rows(noise) * table.start
        before = torch.zeros_like(latents)
        for timestep, row in zip(table.timesteps, table.rows, strict=True):
            numbers = torch.tensor([timestep, *row, guidance]).to(latents.device)
            latents, before = self._step(latents, before, conditioning, numbers, guidance > 1)
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


def _below(one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    """Rows of two arrays [B, ...] in turns [2 B, ...]."""
    return np.stack([one, other], axis=1).reshape(-1, *one.shape[1:])
