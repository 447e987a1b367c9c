"""Stable Diffusion 3 (arXiv 2403.03206): a patch transformer with two CLIP encoders and a T5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtimes.families.family import TWO_STREAMS, Family, TextEncoder

_CLIP = ("CLIPTextModelWithProjection",)


class SD3(Family):
    """prompt_embeds has CLIP's penultimate states, zero-padded to width D, then T5's rows.

    Section 4.2 of the paper. pooled_prompt_embeds has the pooled output of both CLIP encoders. In a
    pipeline without T5, zeros replace T5's rows.
    """

    name = "sd3"
    pipelines = ("StableDiffusion3Pipeline",)
    denoiser = "transformer"
    denoiser_class = "SD3Transformer2DModel"
    blocks = ("JointTransformerBlock",)
    chained_blocks = blocks
    text_encoders = (
        TextEncoder("text_encoder", _CLIP, pooled="text_embeds"),
        TextEncoder("text_encoder_2", _CLIP, pooled="text_embeds"),
        TextEncoder("text_encoder_3", ("T5EncoderModel",), "t5", tokens=256, optional=True),
    )
    num_inference_steps = 28
    guidance_scale = 7.0
    attention_layers = TWO_STREAMS

    def latent_multiple(self, config: Mapping[str, Any]) -> int:
        return int(config.get("patch_size", 2))

    def arguments(self, conditioning: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "encoder_hidden_states": conditioning["prompt_embeds"],
            "pooled_projections": conditioning["pooled_prompt_embeds"],
        }
