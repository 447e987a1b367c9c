"""Keep a UNet's activations channels-last (NHWC), the fastest layout for its convolutions.

diffusers' attention blocks convert activations to NCHW. That costs one copy in the block and one
before the next convolution, in the forward and in the backward pass.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from diffusers.models.transformers.transformer_2d import Transformer2DModel

#: Devices with channels-last convolution weights. torch_npu raises an error for them, and Gaudi's
#: compiler chooses layouts itself.
CHANNELS_LAST = ("cpu", "cuda")


def memory_format(device: torch.device, *, sharded: bool) -> torch.memory_format:
    """The fastest memory format of convolution weights that the device supports.

    FSDP shards dimension 0 of contiguous weights only.

    Args:
        device: device of the weights.
        sharded: whether FSDP shards the weights.
    """
    fastest = device.type in CHANNELS_LAST and not sharded
    return torch.channels_last if fastest else torch.contiguous_format


def keep_channels_last(network: torch.nn.Module) -> None:
    """Make a network's attention blocks return channels-last activations without a copy."""
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
    """Transformer2DModel._get_output_for_continuous_inputs without its `contiguous()`."""

    def to_picture(tokens: torch.Tensor) -> torch.Tensor:
        return tokens.reshape(batch_size, height, width, -1).permute(0, 3, 1, 2)

    if self.use_linear_projection:
        return to_picture(self.proj_out(hidden_states)) + residual
    return self.proj_out(to_picture(hidden_states)) + residual
