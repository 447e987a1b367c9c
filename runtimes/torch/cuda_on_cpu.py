"""Let CPU tensors save for backward what CUDA tensors would.

PyTorch without CUDA cannot run autograd on fake CUDA tensors. A plan therefore uses fake CPU
tensors. Autocast for the CPU has other lists of operators, and another attention kernel.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.library import Library

#: Operators that CUDA's autocast computes in float32 and the CPU's does not, as far as denoisers
#: and text encoders use them; see "CUDA Ops that can autocast to float32" in PyTorch's manual.
FLOAT32 = (
    "group_norm",
    "layer_norm",
    "rms_norm",
    "softmax.int",
    "pow.Tensor_Scalar",
    "rsqrt",
    "upsample_nearest2d",
)


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Within the context, autocast for the CPU selects dtypes and attention as on CUDA.

    It changes the operators of the whole process.
    """
    library = Library("aten", "IMPL")
    try:
        for name in FLOAT32:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, _in_float32(operator), "AutocastCPU")
        name = "scaled_dot_product_attention"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "Overriding a previously registered kernel"
            library.impl(name, _attention, "AutocastCPU", allow_override=True)
        yield
    finally:
        library._destroy()


def _in_float32(operator: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return operator(*_cast(args, torch.float32), **kwargs)

    return run


def _attention(
    query: torch.Tensor,  # [B, heads, T, D]
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Flash attention, which saves its inputs, its output and a logsumexp per row.

    CUDA's kernels for masks and its cuDNN kernel save the same.
    """
    dtype = torch.get_autocast_dtype("cpu")
    options.pop("enable_gqa", None)
    with torch.autocast("cpu", enabled=False):
        out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            *_cast((query, key, value), dtype), dropout_p, is_causal, False, **options
        )[0]
    return out


def _cast(args: Any, dtype: torch.dtype) -> list[Any]:
    return [
        arg.to(dtype) if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg
        for arg in args
    ]
