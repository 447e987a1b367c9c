"""A made-up model family: a DiT over packed latents that takes the guidance scale as an input.

Its modules are FLUX's of diffusers; captions are read by a T5, and a CLIP encoder pools them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import diffusers
import numpy as np
import torch

from runtimes.families.family import Family, TextEncoder


class PatchworkPipeline(diffusers.FluxPipeline):
    """A pipeline class of its own, which diffusers finds by the name in model_index.json."""


diffusers.PatchworkPipeline = PatchworkPipeline


class Patchwork(Family):
    name = "patchwork"
    pipelines = ("PatchworkPipeline",)
    denoiser, denoiser_class = "transformer", "FluxTransformer2DModel"
    blocks = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    text_encoders: ClassVar[tuple[TextEncoder, ...]] = (
        TextEncoder("text_encoder", ("CLIPTextModel",), states=False, pooled="pooler_output"),
        TextEncoder("text_encoder_2", ("T5EncoderModel",), "t5", tokens=512),
    )
    guidance_input = True

    def latent_multiple(self, config: Mapping[str, Any]) -> int:
        return 2

    def latent_channels(self, config: Mapping[str, Any]) -> int:
        return int(config["in_channels"]) // 4

    def sample_size(self, config: Mapping[str, Any]) -> int:
        return 8

    def sigmas(self, steps: int) -> Any:
        return np.linspace(1.0, 1 / steps, steps)

    def pipeline_latents(self, noise: Any) -> Any:
        return pack(noise)

    def predict(
        self, denoiser: Any, noisy_latents: Any, timesteps: Any, conditioning: Mapping[str, Any]
    ) -> Any:
        rows, columns = (size // 2 for size in noisy_latents.shape[-2:])
        text = conditioning["prompt_embeds"]
        predicted = denoiser(
            pack(noisy_latents),
            encoder_hidden_states=text,
            pooled_projections=conditioning["pooled_prompt_embeds"],
            timestep=timesteps / 1000,
            guidance=conditioning["guidance"],
            img_ids=positions(noisy_latents),
            txt_ids=torch.zeros_like(text[0, :, :3]),
            return_dict=False,
        )[0]
        return unpack(predicted, rows, columns)


def pack(latents: Any) -> Any:
    """Latents [B, C, h, w] as tokens of 2 x 2 patches [B, h w / 4, 4 C]."""
    batch, channels, height, width = latents.shape
    patches = latents.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, 4 * channels)


def unpack(tokens: Any, rows: int, columns: int) -> Any:
    """The inverse of `pack`."""
    patches = tokens.reshape(len(tokens), rows, columns, -1, 2, 2)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), -1, 2 * rows, 2 * columns)


def positions(latents: Any) -> Any:
    """(0, row, column) of each token of latents [B, C, h, w]: [h w / 4, 3]."""
    ones = torch.ones_like(latents[0, 0, ::2, ::2])
    places = torch.stack([ones - ones, ones.cumsum(0) - 1, ones.cumsum(1) - 1], dim=-1)
    return places.reshape(-1, 3)


FAMILY = Patchwork()
