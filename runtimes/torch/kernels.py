"""Kernels of runtime torch: attention and memory layout.

`train.attention` names attention kernels of PyTorch on CUDA. A UNet's activations stay
channels-last (NHWC), the fastest layout for its convolutions. diffusers' attention blocks convert
activations to NCHW. That costs one copy in the block and one before the next convolution, in the
forward and in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import MethodType
from typing import Any

import torch
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from runtimes.contract import WrongInput

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash_3": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
#: PyTorch's errors without a kernel, on CUDA and on a CPU, and cuDNN's own.
NO_KERNEL = ("No available kernel", "No viable backend", "No execution plans support the graph")
#: The module of FlashAttention 3, which no package of PyTorch contains.
FLASH_3 = "flash_attn_interface"
HOPPER = (9, 0)  # compute capability


@contextmanager
def attention_kernel(name: str) -> Iterator[None]:
    """Context in which scaled_dot_product_attention uses the kernel that `train.attention` names.

    Raises:
        WrongInput: the kernel does not support the shapes, or a mask: flash attention takes none.
    """
    if name == "auto":
        yield
        return
    # PyTorch's cache of compiled programs does not tell the kernels in them apart.
    programs = torch.compiler.config.patch(cache_key_tag=name)
    try:
        with sdpa_kernel(KERNELS[name]), programs:
            yield
    except RuntimeError as error:
        if not any(words in str(error) for words in NO_KERNEL):
            raise
        raise WrongInput(
            f"train.attention: {name} does not compute this model's attention: set auto"
        ) from None


def check_attention(name: str, device: torch.device) -> None:
    """Raise WrongInput if a device or this environment lacks the kernel."""
    if name == "auto":
        return
    if device.type != "cuda":
        raise WrongInput(f"train.attention needs a CUDA device, not {device.type}: set auto")
    if name != "flash_3":
        return
    if not hasattr(attention, "activate_flash_attention_impl"):
        raise WrongInput("train.attention: flash_3 needs PyTorch 2.11 or later: set flash")
    if find_spec(FLASH_3) is None:
        raise WrongInput(
            f"train.attention: flash_3 needs FlashAttention 3, whose module {FLASH_3} is not "
            "installed: install it, or set flash"
        )
    if torch.cuda.get_device_capability(device) != HOPPER:
        raise WrongInput("train.attention: flash_3 needs a Hopper GPU, such as H100: set flash")


def load_attention(name: str) -> None:
    """Let PyTorch's flash attention of this process call FlashAttention 3, if it is named."""
    if name == "flash_3":
        attention.activate_flash_attention_impl("FA3")


#: Devices with channels-last convolution weights. torch_npu raises an error for them, and Gaudi's
#: compiler chooses layouts itself.
CHANNELS_LAST = ("cpu", "cuda")


def memory_format(device: torch.device, *, sharded: bool) -> torch.memory_format:
    """The fastest memory format of convolution weights that the device supports.

    FSDP shards dimension 0 of contiguous weights only.

    Args:
        device: of the weights.
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
