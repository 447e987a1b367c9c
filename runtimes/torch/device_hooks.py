"""Hooks for what a kind of device does differently in the shared training and sampling code.

The base class serves CPU, CUDA and Ascend. Another kind derives a class from it, which
`open_device` (device.py) constructs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class DeviceHooks:
    """A device, and the hooks of its kind."""

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
