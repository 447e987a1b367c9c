"""CPU replacements for `mint` operators that lack a CPU kernel, or an accurate one (exp).

mindone calls `mint` throughout. The replacements are not used on Ascend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint, ops


def route() -> None:
    """Replace operators of `mint`, before mindone is imported."""
    for name, function in _MINT.items():
        setattr(mint, name, function)
    for name, function in _FUNCTIONAL.items():
        setattr(mint.nn.functional, name, function)
    for layer in (_Conv2d, _LayerNorm, _Embedding):
        setattr(mint.nn, layer.__name__.lstrip("_"), layer)


def route_models() -> None:
    """Replace operators in mindone's own modules. It imports mindone, so call `route` first."""
    from mindone.diffusers.models import activations

    activations.GEGLU.construct = _geglu


def _arange(
    start: float, end: float | None = None, step: float = 1, *, dtype: Any = None
) -> Tensor:
    first, last = (0, start) if end is None else (start, end)
    found = ops.arange(first, last, step)
    return found if dtype is None else found.astype(dtype)


def _linspace(start: float, end: float, steps: int, *, dtype: Any = None) -> Tensor:
    found = ops.linspace(start, end, steps)
    return found if dtype is None else found.astype(dtype)


def _exp(input: Tensor) -> Tensor:
    """exp in float64. The float32 kernel has an error of 5 ulp.

    At timestep 1000 that changes the sines of the timestep embedding by 5e-4.
    """
    return ops.exp(input.astype(ms.float64)).astype(input.dtype)


def _cumsum(input: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    return ops.cumsum(input if dtype is None else input.astype(dtype), dim)


def _baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    product = alpha * ops.bmm(batch1, batch2)
    return product if beta == 0 else beta * input + product


def _split(tensor: Tensor, split_size_or_sections: int | Sequence[int], dim: int = 0) -> Any:
    return ops.split(tensor, split_size_or_sections, dim)


def _chunk(input: Tensor, chunks: int, dim: int = 0) -> Any:
    return ops.split(input, (input.shape[dim] + chunks - 1) // chunks, dim)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return ops.stack(list(tensors), dim)


def _zeros_like(input: Tensor, *, dtype: Any = None) -> Tensor:
    return ops.zeros_like(input, dtype=dtype)


def _ones_like(input: Tensor, *, dtype: Any = None) -> Tensor:
    return ops.ones_like(input, dtype=dtype)


def _full(size: Sequence[int], fill_value: float, *, dtype: Any = None) -> Tensor:
    return ops.full(size, fill_value, dtype=dtype)


def _full_like(input: Tensor, fill_value: float, *, dtype: Any = None) -> Tensor:
    return ops.full_like(input, fill_value, dtype=dtype)


def _repeat_interleave(
    input: Tensor, repeats: int, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    return ops.repeat_interleave(input, repeats, dim)


def _norm(input: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False) -> Tensor:
    if p not in (2, "fro"):
        raise NotImplementedError(f"norm of order {p} has no CPU replacement: use order 2")
    return ops.norm(input, None, dim, keepdim)


def _randn(*size: Any, generator: Any = None, dtype: Any = None) -> Tensor:
    shape = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
    return ops.randn(*shape, dtype=dtype)


def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    return ops.conv2d(input, weight, bias, stride, "pad", padding, dilation, groups)


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    first = -len(normalized_shape)
    if weight is None:
        weight = ops.ones(normalized_shape, input.dtype)
    if bias is None:
        bias = ops.zeros(normalized_shape, input.dtype)
    return ops.LayerNorm(first, first, eps)(input, weight, bias)[0]


def _gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    return ops.gelu(input, approximate)


def _pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float = 0.0) -> Tensor:
    return ops.pad(input, pad, mode, value)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
) -> Tensor:
    return ops.gather(weight, input, 0)


def _mse_loss(input: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    return ops.mse_loss(input, target, reduction=reduction)


class _Conv2d(mint.nn.Conv2d):
    def construct(self, input: Tensor) -> Tensor:
        return ops.conv2d(
            input,
            self.weight,
            self.bias,
            self.stride,
            "pad",
            self.padding,
            self.dilation,
            self.groups,
        )


class _LayerNorm(mint.nn.LayerNorm):
    def construct(self, input: Tensor) -> Tensor:
        return _layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class _Embedding(mint.nn.Embedding):
    def construct(self, input: Tensor) -> Tensor:
        return ops.gather(self.weight, input, 0)


def _geglu(self: Any, hidden_states: Tensor) -> Tensor:
    """GEGLU.construct with `split`: Tensor.chunk has no CPU kernel in graph mode."""
    hidden_states = self.proj(hidden_states)
    hidden_states, gate = ops.split(hidden_states, hidden_states.shape[-1] // 2, -1)
    return hidden_states * self.gelu(gate)


_MINT = {
    "arange": _arange,
    "baddbmm": _baddbmm,
    "chunk": _chunk,
    "cumsum": _cumsum,
    "exp": _exp,
    "full": _full,
    "full_like": _full_like,
    "linspace": _linspace,
    "norm": _norm,
    "ones_like": _ones_like,
    "randn": _randn,
    "repeat_interleave": _repeat_interleave,
    "split": _split,
    "stack": _stack,
    "zeros_like": _zeros_like,
}
_FUNCTIONAL = {
    "conv2d": _conv2d,
    "embedding": _embedding,
    "gelu": _gelu,
    "layer_norm": _layer_norm,
    "mse_loss": _mse_loss,
    "pad": _pad,
}
