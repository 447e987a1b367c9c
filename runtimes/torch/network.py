"""What is trained, as one module: the denoiser, and the text encoders if they are trained too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from configs.training import Train
from runtimes.families import Family, detect_family
from runtimes.job import TrainJob
from runtimes.torch.models import load_denoiser


class Network(torch.nn.Module):
    """Predicts from noisy latents, timesteps and conditioning; its children are pipeline parts.

    A parameter's name is therefore the part and the name within it, as State wants it.
    """

    def __init__(self, family: Family, parts: dict[str, torch.nn.Module]) -> None:
        super().__init__()
        self.family = family
        for name, part in parts.items():
            self.add_module(name, part)

    @classmethod
    def load(cls, job: TrainJob, settings: Train) -> Network:
        """The parts that the settings train, in float32 on the CPU. Raises WrongInput."""
        folder = Path(job.model)
        family = detect_family(folder)
        denoiser = load_denoiser(folder / family.denoiser).requires_grad_(True)
        if settings.gradient_checkpointing:
            denoiser.enable_gradient_checkpointing()
        return cls(family, {family.denoiser: denoiser})

    @property
    def denoiser(self) -> Any:
        """The diffusers model that predicts."""
        return self.get_submodule(self.family.denoiser)

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """What the optimizer updates, by the names that State has."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def forward(
        self,
        noisy_latents: torch.Tensor,
        timesteps: torch.Tensor,
        conditioning: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """The denoiser's prediction [B, C, h, w]."""
        arguments = self.family.arguments(conditioning)
        return self.denoiser(noisy_latents, timesteps, **arguments, return_dict=False)[0]
