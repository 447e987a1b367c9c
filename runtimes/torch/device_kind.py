"""What a kind of device wants done around the shared code. Most want nothing: a kind that does
derives a class from this one, and `open_device` (device.py) gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from configs.training import Train


class DeviceKind:
    """A device, with the places at which a kind of its own may step in."""

    compile_backend = "inductor"  # of torch.compile
    prefetches_batches = True  # from another thread, while it computes
    pads_batches = False  # whether batches of pictures are filled up, so that each is one program
    autocast_caches_casts = True
    foreach: bool | None = True  # of clipping: whether PyTorch does lists of tensors at once there

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def check(self, settings: Train) -> None:
        """Raise WrongInput for train settings that do not go with the device."""

    def prepare_training(self, denoiser: Any) -> None:
        """Before a denoiser that is on the device is trained."""

    def prepare_sampling(self, denoiser: Any) -> None:
        """Before a denoiser that is on the device draws; its weights will stay as they are."""

    def clip_grad_norm(
        self, parameters: Sequence[torch.Tensor], most: float
    ) -> torch.Tensor | None:
        """Clip gradients to an L2 norm and return what it was; None leaves that to others."""
        return None

    def scalar(self, value: float) -> float | torch.Tensor:
        """A number that changes from step to step, as the device takes it."""
        return value

    def mark_step(self) -> None:
        """Here a part of a step ends."""

    def save_compiled(self) -> None:
        """Keep what was compiled; no step is being taken."""

    def figures(self) -> dict[str, float]:
        """More than others report of themselves."""
        return {}

    def compile_seconds(self) -> float:
        """Time spent compiling so far; 0 where nothing is compiled."""
        return 0.0
