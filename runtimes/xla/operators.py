"""Operators of PyTorch whose PyTorch/XLA versions are replaced, in this process.

* `layer_norm` and `group_norm`: XLA's BatchNormTraining, by which PyTorch/XLA computes them, has no
  partitioning rule for rows. Each norm gathered the activations of all devices.
* `upsample_nearest2d`: XLA on a CPU lacks its gradient, and PyTorch/XLA computes it on the host.
* `scaled_dot_product_attention`: PyTorch/XLA's autocast has no rule for it. Norms leave queries and
  keys in float32 beside a bfloat16 value, which the operator refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
#: The dispatcher forgets the registrations when this object is deleted.
_LIBRARY = torch.library.Library("aten", "IMPL")


def replace_operator(operator: torch._ops.OpOverload, function: Callable[..., Any]) -> None:
    """Compute an operator of XLA arrays by a function, with and without autograd."""
    for key in ("AutogradXLA", "XLA"):
        _LIBRARY.impl(operator, function, key, allow_override=True)


@cache
def replace_operators() -> None:
    """Replace the operators of this module; a second call changes nothing."""
    _LIBRARY.impl(ATTENTION, _attend_in_autocast, "AutocastXLA")
    replace_operator(torch.ops.aten.layer_norm.default, layer_norm)
    replace_operator(torch.ops.aten.group_norm.default, group_norm)
    replace_operator(torch.ops.aten.upsample_nearest2d.vec, upsample_nearest)


def layer_norm(
    inputs: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:
    """As torch.nn.functional.layer_norm; statistics in float32."""
    output = _normalized(inputs, tuple(range(-len(normalized_shape), 0)), eps)
    return _affine(output, weight, bias, inputs.dtype)


def group_norm(
    inputs: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """As torch.nn.functional.group_norm of [B, C, ...]; statistics in float32."""
    groups = inputs.reshape(len(inputs), num_groups, -1)
    output = _normalized(groups, (-1,), eps).reshape(inputs.shape)
    channels = (-1, *[1] * (inputs.ndim - 2))
    scale, shift = (one if one is None else one.reshape(channels) for one in (weight, bias))
    return _affine(output, scale, shift, inputs.dtype)


def upsample_nearest(
    inputs: torch.Tensor, output_size: Sequence[int] | None, scale_factors: Sequence[float] | None
) -> torch.Tensor:
    """Upsample [B, C, h, w] to a size, or by factors; each copies rows and columns."""
    batch, channels, height, width = inputs.shape
    if output_size is None:
        assert scale_factors is not None, "PyTorch requires one of the two"
        output_size = [int(height * scale_factors[0]), int(width * scale_factors[1])]
    if tuple(output_size) == (2 * height, 2 * width):
        twice = inputs[:, :, :, None, :, None].expand(batch, channels, height, 2, width, 2)
        return twice.reshape(batch, channels, 2 * height, 2 * width)
    rows, columns = (
        torch.arange(wanted, device=inputs.device) * there // wanted
        for wanted, there in zip(output_size, (height, width), strict=True)
    )
    return inputs.index_select(2, rows).index_select(3, columns)


def _normalized(inputs: torch.Tensor, axes: tuple[int, ...], eps: float) -> torch.Tensor:
    """Mean 0 and variance 1 along axes, in float32."""
    wide = inputs.float()
    centered = wide - wide.mean(axes, keepdim=True)
    return centered * torch.rsqrt(centered.square().mean(axes, keepdim=True) + eps)


def _affine(
    output: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Scaled and shifted, in the wider one of a dtype and the weight's, as norms on CUDA return."""
    if weight is None:
        return output.to(dtype)
    output = output * weight if bias is None else output * weight + bias
    return output.to(torch.promote_types(dtype, weight.dtype))


def _attend_in_autocast(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *given: Any,
    **options: Any,
) -> torch.Tensor:
    """Attention in the dtype of autocast; a boolean mask stays one."""
    dtype = torch.get_autocast_dtype("xla")
    arrays = [one.to(dtype) for one in (query, key, value)]
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.to(dtype)
    with torch.autocast("xla", enabled=False):
        return ATTENTION(*arrays, attn_mask, *given, **options)
