"""Stable Diffusion 1 and 2: a UNet with cross-attention to one CLIP encoder's hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from runtimes.families import family
from runtimes.families.inpainting_aesthetics import latent_channels

#: Channels of the layers by which a ControlNet reads a control picture.
CONTROL_CHANNELS = (16, 32, 96, 256)
OPENCLIP_WIDTH = 1024  # of the text encoder of version 2


def kohya_base(unet: Mapping[str, Any], prediction_type: str) -> family.KohyaBase:
    """Version 1 or 2, with the suffixes of sd-scripts for v-prediction."""
    is_v = prediction_type == "v_prediction"
    suffix = "_v" if is_v else ""
    if unet["cross_attention_dim"] != OPENCLIP_WIDTH:
        return family.KohyaBase(f"sd_v1{suffix}", "stable-diffusion-v1", "diffusers")
    size = "768-v" if is_v else "512"
    return family.KohyaBase(f"sd_v2{suffix}", f"stable-diffusion-v2-{size}", "diffusers")


class SD(family.Family):
    """Prompt embeddings are CLIP's last hidden states after the final norm, as in diffusers."""

    name = "sd"
    pipelines = ("StableDiffusionPipeline", "StableDiffusionInpaintPipeline")
    denoiser = "unet"
    denoiser_class = "UNet2DConditionModel"
    blocks = ("BasicTransformerBlock", "ResnetBlock2D")
    chained_blocks = ("BasicTransformerBlock",)  # a UNet calls residual blocks alternately
    text_encoders: ClassVar[tuple[family.TextEncoder, ...]] = (
        family.TextEncoder("text_encoder", ("CLIPTextModel",)),
    )
    clip_states: ClassVar[family.ClipStates] = "last"
    inputs: ClassVar[tuple[str, ...]] = ("prompt_embeds",)
    guidance_scale = 7.5
    pipeline_options: ClassVar[Mapping[str, Any]] = {
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }
    control = "pixels"
    control_class = "ControlNetModel"
    control_pipeline: ClassVar[str] = "StableDiffusionControlNetPipeline"
    kohya: ClassVar[family.KohyaNames | None] = family.KohyaNames(
        *({"text_encoder": "lora_te"}, lambda layer, config: family.KohyaLayer(layer), kohya_base)
    )

    def latent_channels(self, config: Mapping[str, Any]) -> int:
        return latent_channels(config)

    def empty_control(self, denoiser: Any, scale: int, layers: Mapping[str, int]) -> Any:
        from diffusers import ControlNetModel  # seconds to import

        # Each of them but the first halves the picture's sides: diffusers' four are for 8.
        channels = CONTROL_CHANNELS[: scale.bit_length()]
        return ControlNetModel.from_unet(
            denoiser, conditioning_embedding_out_channels=channels, load_weights_from_unet=False
        )

    def control_residuals(
        self, network: Any, control: Any, scale: float, inputs: Sequence[Any], named: Any
    ) -> dict[str, Any]:
        latents, *rest = inputs
        down, middle = network(
            latents,
            rest[0] if rest else named["timestep"],
            encoder_hidden_states=named["encoder_hidden_states"],
            controlnet_cond=control.to(latents.dtype),
            conditioning_scale=scale,
            added_cond_kwargs=named.get("added_cond_kwargs"),
            return_dict=False,
        )
        return {"down_block_additional_residuals": down, "mid_block_additional_residual": middle}

    def arguments(self, conditioning: Mapping[str, Any]) -> dict[str, Any]:
        inputs = {"encoder_hidden_states": conditioning["prompt_embeds"]}
        if "aesthetic_score" in conditioning:  # see inpainting_aesthetics.py
            inputs["class_labels"] = conditioning["aesthetic_score"]
        return inputs
