"""Attention kernels of PyTorch on CUDA, by their names in `train.attention`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from configs.errors import Refused

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
        Refused: the kernel does not support the shapes, or a mask: flash attention takes none.
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
        raise Refused(
            f"train.attention: {name} does not compute this model's attention: set auto"
        ) from None


def check_attention(name: str, device: torch.device) -> None:
    """Raise Refused if a device or this environment lacks the kernel."""
    if name == "auto":
        return
    if device.type != "cuda":
        raise Refused(f"train.attention needs a CUDA device, not {device.type}: set auto")
    if name != "flash_3":
        return
    if not hasattr(attention, "activate_flash_attention_impl"):
        raise Refused("train.attention: flash_3 needs PyTorch 2.11 or later: set flash")
    if find_spec(FLASH_3) is None:
        raise Refused(
            f"train.attention: flash_3 needs FlashAttention 3, whose module {FLASH_3} is not "
            "installed: install it, or set flash"
        )
    if torch.cuda.get_device_capability(device) != HOPPER:
        raise Refused("train.attention: flash_3 needs a Hopper GPU, such as H100: set flash")


def load_attention(name: str) -> None:
    """Let PyTorch's flash attention of this process call FlashAttention 3, if it is named."""
    if name == "flash_3":
        attention.activate_flash_attention_impl("FA3")
