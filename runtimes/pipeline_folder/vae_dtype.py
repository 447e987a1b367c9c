"""The compute dtype of a VAE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def vae_overflows(config: Mapping[str, Any], *, float16: bool) -> bool:
    """Whether a VAE must compute in float32, because float16 would overflow.

    Args:
        config: the VAE's; `force_upcast` is true if it is missing, as in diffusers.
        float16: whether other models compute in float16.
    """
    return float16 and bool(config.get("force_upcast", True))
