"""Load the network of a drawing: its denoiser, and the text encoders that it runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import Drawing
from runtimes.sample.generate_job import load_trained_components
from runtimes.torch_models.loading import load_denoiser, load_text_encoder
from runtimes.torch_models.network import Network, load_frozen_clip, merge_adapters


def load_network(
    drawing: Drawing,
    base: Base,
    dtype: torch.dtype,
    device: torch.device,
    text_dtype: str | None = None,
) -> Network:
    """The frozen network of a drawing, in evaluation mode, on `device` in `dtype`.

    Adapters are merged in float32 before the weights are cast to `dtype`.

    Args:
        text_dtype: as GenerateJob.text_dtype; the base's text encoders then encode captions, unless
            the drawing has trained ones.

    Raises:
        Refused: weights or adapters are missing, damaged or of another architecture.
    """
    family = base.family

    def load(name: str, folder: Path, adapters: Mapping[str, Any]) -> Any:
        first = torch.float32 if adapters else dtype
        if name == family.denoiser:
            part = load_denoiser(folder, first)
        else:
            part = load_text_encoder(base, name, first, folder)
        merge_adapters(name, part, adapters)
        # ModelMixin.to of diffusers logs a warning for every cast to half precision.
        return torch.nn.Module.to(part, dtype)

    parts = load_trained_components(drawing, base, load)
    frozen = list[torch.nn.Module]()
    if text_dtype is not None and parts.keys().isdisjoint(family.clip_encoders):
        frozen = load_frozen_clip(base, text_dtype)
    network = Network(family, parts, frozen)
    return network.to(device).requires_grad_(False).eval()
