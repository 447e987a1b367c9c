"""Frozen linear layers in 8 bits: half the memory of bfloat16 under LoRA adapters."""

from __future__ import annotations

from typing import Any

import torch

#: The largest absolute value of a symmetric 8-bit integer.
LARGEST = 127


class Int8Linear(torch.nn.Linear):
    """A frozen linear layer with 8-bit weights and one float32 scale per output feature.

    The scale is the row's largest absolute weight / 127 (absmax quantization, as in LLM.int8(),
    arXiv 2208.07339, for weights alone). Products are computed in the input's dtype.
    """

    scale: torch.Tensor  # [out_features, 1] float32

    @classmethod
    @torch.no_grad()
    def of(cls, layer: torch.nn.Linear) -> Int8Linear:
        """The 8-bit layer of a linear layer, on the same device; `meta` included."""
        with torch.device("meta"):
            made = cls(layer.in_features, layer.out_features, bias=layer.bias is not None)
        weight = layer.weight.float()
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / LARGEST
        rounded = (weight / scale).round().to(torch.int8)
        made.weight = torch.nn.Parameter(rounded, requires_grad=False)
        made.bias = layer.bias
        # Not persistent: a checkpoint holds adapters alone, and the base is rounded at each start.
        made.register_buffer("scale", scale, persistent=False)
        return made.train(layer.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        product: torch.Tensor = _Linear.apply(input, self.weight, self.scale, bias)
        return product


class _Linear(torch.autograd.Function):
    """A linear layer whose backward pass keeps the 8-bit weight alone.

    Autograd of a plain product would keep the dequantized weight of each layer.
    """

    @staticmethod
    def forward(
        context: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        context.save_for_backward(weight, scale)
        return torch.nn.functional.linear(input, _dequantized(weight, scale, input.dtype), bias)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        weight, scale = context.saved_tensors
        return gradient @ _dequantized(weight, scale, gradient.dtype), None, None, None


def _dequantized(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (weight * scale).to(dtype)  # a scale in bfloat16 would be 0.4% off


def quantize_blocks(model: torch.nn.Module) -> None:
    """Replace the linear layers of a model's repeated blocks by 8-bit ones, one after another.

    Embeddings and the last projection, outside of the blocks, are small and keep their dtype.
    """
    for holder in list(model.modules()):
        if isinstance(holder, torch.nn.ModuleList):
            _quantize(holder)


def _quantize(module: torch.nn.Module) -> None:
    for name, child in list(module.named_children()):
        if type(child) is torch.nn.Linear:
            setattr(module, name, Int8Linear.of(child))
        else:
            _quantize(child)
