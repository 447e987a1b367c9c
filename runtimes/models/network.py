"""What is trained, as one module: the denoiser, and the text encoders if they are trained too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from configs.training import Train
from runtimes.adapters.lora import state_name
from runtimes.families import Family, detect_family
from runtimes.models.loading import (
    empty_denoiser,
    empty_text_encoder,
    load_denoiser,
    load_text_encoder,
)
from runtimes.models.lora import add_adapters
from runtimes.models.npu_formulas import keep_formulas
from runtimes.models.random_init import fresh_denoiser
from runtimes.models.text_encoding import encode_in_step
from runtimes.pipeline_folder.denoiser_config import job_config, trained_config
from runtimes.pipeline_folder.describe import read_config
from runtimes.process.job import TrainJob


class Network(torch.nn.Module):
    """Predicts from noisy latents, timesteps and conditioning; its children are pipeline parts.

    A parameter's name is therefore the part and the name within it, as State wants it.
    """

    def __init__(self, family: Family, parts: dict[str, torch.nn.Module]) -> None:
        super().__init__()
        self.family = family
        for name, part in parts.items():
            self.add_module(name, part)
        keep_formulas(self)

    @classmethod
    def load(cls, job: TrainJob, settings: Train) -> Network:
        """The parts that the settings train, on the CPU. Raises WrongInput.

        What is trained is in float32; what adapters are laid over, in the compute precision.
        """
        folder = Path(job.model)
        family, dtype = detect_family(folder), _dtype(settings)
        base = folder / family.denoiser
        config = job_config(job, settings)
        if settings.init == "random":
            denoiser = fresh_denoiser(config, settings.seed)
        else:
            denoiser = load_denoiser(base, dtype, config, settings.seed)
        parts = {family.denoiser: denoiser}
        if settings.train_text_encoder:
            names = family.clip_encoders
            parts |= {name: load_text_encoder(folder, name, dtype) for name in names}
        return cls._prepared(family, parts, settings)

    @classmethod
    def without_weights(
        cls, folder: Path, settings: Train, denoiser_config: dict[str, Any] | None = None
    ) -> Network:
        """The same from config files alone, in memory that nothing has been written to: to plan
        with. Raises WrongInput.
        """
        family, dtype = detect_family(folder), _dtype(settings)
        base = folder / family.denoiser
        config = trained_config(read_config(base / "config.json"), settings, denoiser_config)
        parts = {family.denoiser: empty_denoiser(base, config)}
        if settings.train_text_encoder:
            parts |= {name: empty_text_encoder(folder, name) for name in family.clip_encoders}
        parts = {name: part.to(dtype).to_empty(device="cpu") for name, part in parts.items()}
        return cls._prepared(family, parts, settings)

    @classmethod
    def _prepared(
        cls, family: Family, parts: dict[str, torch.nn.Module], settings: Train
    ) -> Network:
        full = settings.method == "full"
        for name, part in parts.items():
            part.requires_grad_(full)
            if not full:
                add_adapters(name, part, settings.lora, settings.seed, family.attention_layers)
            if settings.gradient_checkpointing:
                _checkpoint(part)
        return cls(family, parts)

    def place(self, device: torch.device, memory_format: torch.memory_format) -> None:
        """Put everything on a device; weights of convolutions in a memory format."""
        self.to(device, memory_format=memory_format)
        for name, parameter in self.named_parameters():
            if "lora_" in name:  # PEFT's DoRA takes a view of them as matrices
                parameter.data = parameter.data.contiguous()

    @property
    def denoiser(self) -> Any:
        """The diffusers model that predicts."""
        return self.get_submodule(self.family.denoiser)

    @property
    def text_encoders(self) -> list[torch.nn.Module]:
        """The CLIP encoders, if captions are encoded here, in the family's order."""
        children = dict(self.named_children())
        return [children[name] for name in self.family.clip_encoders if name in children]

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """What the optimizer updates, by the names that State has."""
        return {
            state_name(part, name): parameter
            for part, module in self.named_children()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }

    def constants(self) -> dict[str, NDArray[np.float32]]:
        """What the parts hold beside weights, such as a table of positions, by State's names."""
        return {
            f"{prefix}.{name}": buffer.float().cpu().numpy()
            for prefix, module in self.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        }

    def forward(
        self,
        noisy_latents: torch.Tensor,
        timesteps: torch.Tensor,
        conditioning: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """The denoiser's prediction [B, C, h, w]."""
        if "input_ids" in conditioning:
            conditioning = encode_in_step(self.family, self.text_encoders, conditioning)
        if "inpainting" in conditioning:  # see families/unet_inputs.py
            noisy_latents = torch.cat([noisy_latents, conditioning["inpainting"]], dim=1)
        return self.family.predict(self.denoiser, noisy_latents, timesteps, conditioning)


def _dtype(settings: Train) -> torch.dtype:
    """What weights are loaded in."""
    return torch.float32 if settings.method == "full" else getattr(torch, settings.compute_dtype)


def _checkpoint(part: Any) -> None:
    """Have a part forget its activations and compute them again in the backward pass."""
    if hasattr(part, "enable_gradient_checkpointing"):  # diffusers
        part.enable_gradient_checkpointing()
    else:  # transformers
        part.gradient_checkpointing_enable({"use_reentrant": False})
