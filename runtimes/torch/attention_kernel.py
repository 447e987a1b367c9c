"""PyTorch's attention kernel by its name in `train.attention`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.nn.attention import SDPBackend, sdpa_kernel

#: Names of `train.attention`.
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention_kernel(name: str) -> AbstractContextManager[None]:
    """Context in which scaled_dot_product_attention uses the kernel that `train.attention` names.

    Without a kernel for the device and shapes, PyTorch raises RuntimeError.
    """
    return nullcontext() if name == "auto" else sdpa_kernel(KERNELS[name])
