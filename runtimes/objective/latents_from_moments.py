"""Scale and shift between the VAE's latents and the denoiser's."""

from __future__ import annotations

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
    mean: Sequence[float] | None = None  # [C], latents_mean and latents_std in diffusers
    std: Sequence[float] | None = None

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> LatentScale:
        """From the content of an encode artifact's latents.json, or a VAE's config."""
        return cls(
            info["scaling_factor"],
            info.get("shift_factor") or 0.0,
            info.get("latents_mean"),
            info.get("latents_std"),
        )

    def sample(self, mean: Array, logvar: Array, eps: Array) -> Array:
        """Scaled posterior sample z = (mean + exp(logvar / 2) eps - shift) * scale [B, C, h, w].

        The log-variance is clipped to [-30, 20], as in diffusers' DiagonalGaussianDistribution.
        """
        return self.scaled(mean + np.exp(np.float32(0.5) * np.clip(logvar, -30, 20)) * eps)

    def scaled(self, z: Array) -> Array:
        """The denoiser's latents [B, C, h, w] f32 from the VAE's latents `z`."""
        if self.mean is not None and self.std is not None:
            center, spread = (np.array(x, np.float32)[:, None, None] for x in (self.mean, self.std))
            return (z - center) / spread * np.float32(self.scaling_factor)
        return (z - np.float32(self.shift_factor)) * np.float32(self.scaling_factor)
