"""float32 matrix products on a CPU, by the faster of the two libraries that PyTorch has for them.

PyTorch multiplies float32 matrices by MKL, which uses AVX-512 on Intel's chips alone; oneDNN, which
does its convolutions, uses it on those of every maker (docs/decisions.md).
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

CPUINFO = Path("/proc/cpuinfo")
#: AMD's first family of CPUs whose units are as wide as AVX-512: Zen 5.
WIDE_FAMILY = 26
#: Multiplications of the least product that oneDNN does faster: it takes longer to begin.
LEAST = 6_000_000


@cache
def onednn_is_faster() -> bool:
    """Whether this machine's CPU is an AMD that has AVX-512 in full width."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if not wide or not torch.backends.mkldnn.is_available() or not CPUINFO.exists():
        return False
    told = CPUINFO.read_text(encoding="utf-8")
    family = re.search(r"^cpu family\s*: (\d+)$", told, re.MULTILINE)
    return "AuthenticAMD" in told and family is not None and int(family[1]) >= WIDE_FAMILY


def with_faster_products(model: torch.nn.Module, device: torch.device) -> None:
    """Have the linear layers of a float32 model that goes to a device multiply by what is faster
    there, forward and backward."""
    if device.type != "cpu" or not onednn_is_faster():
        return
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.forward = MethodType(_forward, module)


def linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x W^T + b` for inputs [..., in] and weight [out, in], with gradients."""
    if _goes_to_onednn(inputs, weight):
        return cast(torch.Tensor, _Linear.apply(inputs, weight, bias))
    return torch.nn.functional.linear(inputs, weight, bias)


def product(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`a b^T + bias` for a [..., k] and b [n, k], without gradients."""
    if _goes_to_onednn(left, right):
        return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return torch.nn.functional.linear(left, right, bias)


def _goes_to_onednn(left: torch.Tensor, right: torch.Tensor) -> bool:
    if torch.compiler.is_compiling():  # Inductor takes the operator with constant weights alone
        return False
    kinds = {(tensor.device.type, tensor.dtype) for tensor in (left, right)}
    if kinds != {("cpu", torch.float32)} or not onednn_is_faster():
        return False
    fits = left.shape[-1] == right.shape[-1]  # else PyTorch says in plain words what is wrong
    return fits and left.numel() * len(right) >= LEAST


def _forward(layer: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    return linear(inputs, layer.weight, layer.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        of_inputs, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(inputs if of_weight else None, weight if of_inputs else None)
        return product(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_inputs = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_inputs = product(gradient, weight.t())
        if ctx.needs_input_grad[1]:
            of_weight = product(rows.t(), inputs.reshape(-1, inputs.shape[-1]).t())
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_inputs, of_weight, of_bias
