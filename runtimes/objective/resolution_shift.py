"""Dynamic shifting of a flow's noise levels by the size of the picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


@dataclass(frozen=True)
class ResolutionShift:
    """Dynamic shifting of a flow's sigmas: larger pictures need more noise (SD3, section 5.3.2).

    mu is linear in the number of image tokens, as in diffusers' `calculate_shift`. Sampling may
    also stretch its few sigmas to end at `shift_terminal` (0.02 of Qwen-Image), training does not.
    """

    base_tokens: int
    max_tokens: int
    base_shift: float  # mu at base_tokens
    max_shift: float  # mu at max_tokens
    exponential: bool  # else linear: the factor is mu, not exp(mu)
    patch: int  # latent pixels along one side of a token

    @classmethod
    def from_config(cls, config: Mapping[str, Any], patch: int) -> ResolutionShift | None:
        """From a diffusers scheduler's config; None without dynamic shifting."""
        if not config.get("use_dynamic_shifting"):
            return None
        return cls(
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
            config.get("time_shift_type", "exponential") == "exponential",
            patch,
        )

    def mu(self, height: int, width: int) -> float:
        """The shift that the pipeline passes to the scheduler for latents [C, height, width]."""
        tokens = (height // self.patch) * (width // self.patch)
        return self.mu_of(tokens)

    def mu_of(self, tokens: int) -> float:
        """The same for a number of image tokens."""
        slope = (self.max_shift - self.base_shift) / (self.max_tokens - self.base_tokens)
        return tokens * slope + self.base_shift - slope * self.base_tokens

    def shifted(self, sigmas: Array, mu: float) -> Array:
        """sigma' = m / (m + 1 / sigma - 1) [T] f32, where m is exp(mu) or mu."""
        factor = np.exp(mu) if self.exponential else mu
        return (factor / (factor + (1 / sigmas.astype(np.float64) - 1))).astype(np.float32)
