"""Restore the formulas of diffusers' layers where torch_npu is installed."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

from runtimes.hosts.detect_ascend import torch_npu_version


def keep_diffusers_formulas(network: torch.nn.Module) -> None:
    """Replace the forward methods of layers that diffusers specializes for torch_npu.

    If torch_npu is importable, GEGLU and RMSNorm of diffusers call its operators on every device,
    and fail on a CPU. On an NPU, diffusers' GEGLU (arXiv 2002.05202) uses the tanh approximation of
    GELU, which other devices do not.
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
