"""Hooks for what a kind of device does differently in the shared training and sampling code.

`DeviceHooks` serves CPU, CUDA and Ascend. Another kind derives a class from it, which `open_device`
(device.py) constructs. torch_npu is imported only if device npu is selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from configs.errors import Refused
from configs.secrets import one_line
from runtimes.hosts.detect_ascend import missing_components


class DeviceHooks:
    """A device, and the hooks for its kind."""

    compile_backend = "inductor"  # of torch.compile
    prefetches_batches = True  # whether the loader's thread copies batches during a step
    pads_batches = False  # whether image batches are padded to one size, to reuse one program
    autocast_caches_casts = True  # `cache_enabled` of torch.autocast
    foreach: bool | None = True  # `foreach` of PyTorch's gradient clipping

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def prepare_training(self, denoiser: Any) -> None:
        """Prepare a denoiser on the device for training."""

    def prepare_sampling(self, denoiser: Any) -> None:
        """Prepare a denoiser on the device for sampling; its weights must not change afterwards."""

    def clip_grad_norm(
        self, parameters: Sequence[torch.Tensor], most: float
    ) -> torch.Tensor | None:
        """Clip gradients to a global L2 norm with a kernel of the device.

        Args:
            parameters: with their gradients, which are scaled in place.
            most: largest allowed norm.

        Returns:
            The norm before clipping, a scalar on the device. None if the device has no such kernel;
            the caller then clips with PyTorch.
        """
        return None

    def scalar(self, value: float) -> float | torch.Tensor:
        """A number that changes with each step, as an operand that causes no recompilation."""
        return value

    def mark_step(self) -> None:
        """End the current graph on devices that execute lazily."""

    def save_compiled(self) -> None:
        """Save newly compiled programs to the cache. No step may be in progress."""

    def figures(self) -> dict[str, float]:
        """Metrics that only this kind of device reports."""
        return {}

    def compile_seconds(self) -> float:
        """Seconds of compilation so far; 0 where the device compiles nothing."""
        return 0.0


def load() -> None:
    """Register device npu with PyTorch. Raises Refused if torch_npu cannot be imported."""
    try:
        import torch_npu  # noqa: F401  # registers the device
    except (ImportError, RuntimeError, OSError) as error:
        missing = "; ".join(missing_components())
        raise Refused(
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
