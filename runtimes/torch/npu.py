"""Ascend NPUs by torch_npu, which is imported when device npu is asked for, and never otherwise."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch

from runtimes.contract import WrongInput
from runtimes.hosts.ascend import lacking, torch_npu_version


def load() -> None:
    """Have PyTorch know device npu. Raises WrongInput if it cannot."""
    try:
        import torch_npu  # noqa: F401  # registers the device
    except (ImportError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        missing = "; ".join(lacking())
        raise WrongInput(
            f"device npu: torch_npu does not load: {reason}" + (f" ({missing})" if missing else "")
        ) from None


def attend(denoiser: Any, device: torch.device) -> None:
    """Have a UNet on an NPU use its fused attention, which is for half precision; in float32
    diffusers' processor computes the ordinary one.

    It would take the place of SD3's processors too, which attend to pictures and captions at once.
    """
    from diffusers.models.attention_processor import AttnProcessor2_0

    processors = getattr(denoiser, "attn_processors", {}).values()
    if device.type == "npu" and {type(each) for each in processors} == {AttnProcessor2_0}:
        denoiser.enable_npu_flash_attention()


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
