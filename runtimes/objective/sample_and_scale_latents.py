"""Scale and shift between the VAE's latents and the denoiser's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


@dataclass(frozen=True)
class LatentScale:
    """Scale and shift from the VAE's latents to the denoiser's latents."""

    scaling_factor: float
    shift_factor: float = 0.0
    #: latents_mean and latents_std: [C], or [C p p], one for each latent pixel of a p x p patch.
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    draws: bool = True  # whether `sample` draws from the posterior; else it takes the mean

    @classmethod
    def from_info(cls, info: Mapping[str, Any], *, draws: bool = True) -> LatentScale:
        """From the content of an encode artifact's latents.json, or a VAE's config."""
        return cls(
            info["scaling_factor"],
            info.get("shift_factor") or 0.0,
            info.get("latents_mean"),
            info.get("latents_std"),
            draws,
        )

    def sample(self, mean: Array, logvar: Array, eps: Array) -> Array:
        """Scaled posterior sample z = (mean + exp(logvar / 2) eps - shift) * scale [B, C, h, w].

        The log-variance is clipped to [-30, 20], as in diffusers' DiagonalGaussianDistribution.
        Without draws, eps counts as 0.
        """
        if not self.draws:
            return self.scaled(mean)
        return self.scaled(mean + np.exp(np.float32(0.5) * np.clip(logvar, -30, 20)) * eps)

    def scaled(self, z: Array) -> Array:
        """The denoiser's latents [B, C, h, w] f32 from the VAE's latents `z`."""
        if self.mean is not None and self.std is not None:
            center, spread = (tiled(x, z.shape[-3:]) for x in (self.mean, self.std))
            return (z - center) / spread * np.float32(self.scaling_factor)
        return (z - np.float32(self.shift_factor)) * np.float32(self.scaling_factor)

    def unscaled(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """(scale, shift) f32 of the inverse: the VAE's latents are `latents * scale + shift`.

        Args:
            shape: (C, h, w) of the latents; the results broadcast to it.
        """
        spread, center = np.ones((1, 1, 1), np.float32), np.zeros((1, 1, 1), np.float32)
        if self.mean is not None and self.std is not None:
            spread, center = tiled(self.std, shape), tiled(self.mean, shape)
        return spread / np.float32(self.scaling_factor), center + np.float32(self.shift_factor)


def tiled(values: Sequence[float], shape: tuple[int, ...]) -> Array:
    """Values [C] as f32 [C, 1, 1], or values [C p p] of a patch, repeated to `shape` (C, h, w)."""
    channels, height, width = shape
    side = math.isqrt(len(values) // channels)
    patch = np.array(values, np.float32).reshape(channels, side, side)
    return patch if side == 1 else np.tile(patch, (1, height // side, width // side))
