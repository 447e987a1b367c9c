"""Keep a UNet's activations channels-last (NHWC), in which its convolutions are fastest.

diffusers' attention blocks bring them back to NCHW, which costs a copy there and another one before
the next convolution, forward and backward.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from diffusers.models.transformers.transformer_2d import Transformer2DModel

#: Devices that take weights channels-last: torch_npu raises at them, and on a Gaudi layouts are
#: its compiler's business.
CHANNELS_LAST = ("cpu", "cuda")


def memory_format(device: torch.device, *, sharded: bool) -> torch.memory_format:
    """How the weights of convolutions lie: as they are computed fastest, where that can be.

    FSDP cuts rows off what lies row by row.
    """
    fastest = device.type in CHANNELS_LAST and not sharded
    return torch.channels_last if fastest else torch.contiguous_format


def keep_channels_last(network: torch.nn.Module) -> None:
    """Have attention blocks give back what they computed as it lies: channels last."""
    for module in network.modules():
        if isinstance(module, Transformer2DModel):
            module._get_output_for_continuous_inputs = MethodType(_output, module)


def _output(
    self: Any,
    hidden_states: torch.Tensor,  # [B, h * w, D]
    residual: torch.Tensor,  # [B, C, h, w]
    batch_size: int,
    height: int,
    width: int,
    inner_dim: int,
) -> torch.Tensor:
    """Transformer2DModel's own, without its `contiguous()`."""

    def to_picture(tokens: torch.Tensor) -> torch.Tensor:
        return tokens.reshape(batch_size, height, width, -1).permute(0, 3, 1, 2)

    if self.use_linear_projection:
        return to_picture(self.proj_out(hidden_states)) + residual
    return self.proj_out(to_picture(hidden_states)) + residual
