"""Stable Diffusion 1 and 2: a UNet with cross-attention to one CLIP encoder's hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from runtimes.families.family import ClipStates, Family, KohyaLayer, KohyaNames, TextEncoder
from runtimes.families.inpainting_and_scores import latent_channels


class SD(Family):
    """Prompt embeddings are CLIP's last hidden states after the final norm, as in diffusers."""

    name = "sd"
    pipelines = ("StableDiffusionPipeline", "StableDiffusionInpaintPipeline")
    denoiser, denoiser_class = "unet", "UNet2DConditionModel"
    blocks = ("BasicTransformerBlock", "ResnetBlock2D")
    chained_blocks = ("BasicTransformerBlock",)  # a UNet calls residual blocks alternately
    text_encoders: ClassVar[tuple[TextEncoder, ...]] = (
        TextEncoder("text_encoder", ("CLIPTextModel",)),
    )
    clip_states: ClassVar[ClipStates] = "last"
    inputs: ClassVar[tuple[str, ...]] = ("prompt_embeds",)
    guidance_scale = 7.5
    pipeline_options: ClassVar[Mapping[str, Any]] = {
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }
    kohya: ClassVar[KohyaNames | None] = KohyaNames(
        {"text_encoder": "lora_te"}, lambda layer, config: KohyaLayer(layer)
    )

    def latent_channels(self, config: Mapping[str, Any]) -> int:
        return latent_channels(config)

    def arguments(self, conditioning: Mapping[str, Any]) -> dict[str, Any]:
        found = {"encoder_hidden_states": conditioning["prompt_embeds"]}
        if "aesthetic_score" in conditioning:  # see inpainting_and_scores.py
            found["class_labels"] = conditioning["aesthetic_score"]
        return found
