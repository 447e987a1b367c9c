"""Ascend NPUs by torch_npu, which is imported when device npu is asked for, and never otherwise."""

from __future__ import annotations

from typing import Any

import torch

from runtimes.contract import WrongInput
from runtimes.hosts.ascend import missing_components


def load() -> None:
    """Have PyTorch know device npu. Raises WrongInput if it cannot."""
    try:
        import torch_npu  # noqa: F401  # registers the device
    except (ImportError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        missing = "; ".join(missing_components())
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
