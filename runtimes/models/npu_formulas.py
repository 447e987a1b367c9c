"""Keep diffusers' layers to their own formulas where torch_npu is installed."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

from runtimes.hosts.ascend import torch_npu_version


def keep_formulas(network: torch.nn.Module) -> None:
    """Have diffusers' layers compute the same on an NPU as elsewhere, and elsewhere at all.

    Wherever torch_npu is installed, they call operators of its own on whatever device they are on;
    and GEGLU (arXiv 2002.05202) takes a GELU that is approximated by tanh.
    """
    if torch_npu_version() is None:
        return
    from diffusers.models.activations import GEGLU
    from diffusers.models.normalization import RMSNorm

    own = {GEGLU: _geglu, RMSNorm: _rms_norm}
    for module in network.modules():
        if type(module) in own:
            module.forward = MethodType(own[type(module)], module)


def _geglu(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    projected = layer.proj(inputs)  # [..., 2 D]
    if projected.device.type == "npu":
        import torch_npu

        return torch_npu.npu_geglu(projected, dim=-1, approximate=0)[0]
    states, gate = projected.chunk(2, dim=-1)
    return states * torch.nn.functional.gelu(gate)


def _rms_norm(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    if inputs.device.type == "npu" or layer.weight is None:
        return type(layer).forward(layer, inputs)
    normal = inputs * (inputs.float().square().mean(-1, keepdim=True) + layer.eps).rsqrt()
    if layer.weight.dtype in (torch.float16, torch.bfloat16):
        normal = normal.to(layer.weight.dtype)
    normal = normal * layer.weight
    return normal if layer.bias is None else normal + layer.bias
