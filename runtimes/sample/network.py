"""The network of a drawing: a model's denoiser, and text encoders that were trained with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from runtimes.families import detect_family
from runtimes.models.loading import load_denoiser, load_text_encoder
from runtimes.models.lora import lay_over
from runtimes.models.network import Network
from runtimes.process.job import Drawing
from runtimes.sample.start import own_parts


def load_network(
    drawing: Drawing, model: Path, dtype: torch.dtype, device: torch.device
) -> Network:
    """The model's own parts: its denoiser, and its text encoders if they were trained too.

    Adapters are merged in float32 before the weights are cast.
    """
    family = detect_family(model)

    def load(name: str, folder: Path, adapters: Mapping[str, Any]) -> Any:
        first = torch.float32 if adapters else dtype
        if name == family.denoiser:
            part = load_denoiser(folder, first)
        else:
            part = load_text_encoder(model, name, first, folder)
        lay_over(name, part, adapters)
        return torch.nn.Module.to(part, dtype)  # diffusers' own warns of what it casts

    network = Network(family, own_parts(drawing, model, load))
    return network.to(device).requires_grad_(False).eval()
