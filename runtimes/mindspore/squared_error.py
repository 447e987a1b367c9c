"""The loss of a sample, before its weight, in MindSpore."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, ops


def squared_errors(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean squared error per sample [B] f32 of [B, C, h, w] arrays."""
    return ops.square(prediction.astype(ms.float32) - target).mean((1, 2, 3))
