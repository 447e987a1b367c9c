"""The loss of a sample, before its weight."""

from __future__ import annotations

from torch import Tensor


def squared_errors(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean squared error per sample [B] f32 of [B, C, h, w]; `target` is f32."""
    return (prediction.float() - target).square().mean(dim=(1, 2, 3))
