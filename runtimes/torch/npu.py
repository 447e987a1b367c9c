"""Ascend NPUs by torch_npu, which is imported only if device npu is selected."""

from __future__ import annotations

from typing import Any

import torch

from configs.secrets import one_line
from runtimes.contract import WrongInput
from runtimes.hosts.detect_ascend import missing_components


def load() -> None:
    """Register device npu with PyTorch. Raises WrongInput if torch_npu cannot be imported."""
    try:
        import torch_npu  # noqa: F401  # registers the device
    except (ImportError, RuntimeError, OSError) as error:
        missing = "; ".join(missing_components())
        raise WrongInput(
            f"device npu: torch_npu does not load: {one_line(error, 200)}"
            + (f" ({missing})" if missing else "")
        ) from None


def enable_npu_attention(denoiser: Any, device: torch.device) -> None:
    """Enable the NPU's fused attention in a UNet.

    The fused operator supports half precision only; diffusers' processor falls back to unfused
    attention in float32. SD3 keeps its processors: they compute joint attention over image and
    text tokens, which the NPU processor does not.
    """
    from diffusers.models.attention_processor import AttnProcessor2_0

    processors = getattr(denoiser, "attn_processors", {}).values()
    if device.type == "npu" and {type(each) for each in processors} == {AttnProcessor2_0}:
        denoiser.enable_npu_flash_attention()
