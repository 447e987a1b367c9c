"""Stable Diffusion XL (arXiv 2307.01952): a UNet with two CLIP encoders and size conditioning."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from runtimes.families import family
from runtimes.families.sd import SD

_TOP = {
    "conv_in": "input_blocks.0.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
_IN_RESNET = {
    "conv1": "in_layers.2",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_PROJECTING = "CLIPTextModelWithProjection"
_BLOCK = re.compile(r"(down|mid|up)_blocks?(?:\.(\d+))?\.(\w+?)s\.(\d+)\.(.+)")


def stability_name(layer: str, unet: Mapping[str, Any]) -> str:
    """The name in Stability's code of a layer of diffusers' UNet2DConditionModel.

    Stability's code numbers the layers of all blocks in sequence. `input_blocks` starts with
    conv_in, and a downsampler has its own number. In `output_blocks` an upsampler shares the
    number of the block's last layer.

    Args:
        layer: name in diffusers, such as `down_blocks.1.attentions.0.proj_in`.
        unet: the UNet's config.

    Raises:
        ValueError: Stability's code has no such layer.
    """
    if layer in _TOP:
        return _TOP[layer]
    match = _BLOCK.fullmatch(layer)
    if match is None:
        raise ValueError(f"{layer} has no name in Stability's code")
    if not isinstance(unet["layers_per_block"], int):
        raise ValueError("Stability's code has the same number of layers in every block")
    side, block, kind, number, rest = match.groups()
    block = int(block or 0)
    number = int(number)
    each = unet["layers_per_block"] + 1
    rest = _IN_RESNET.get(rest, rest) if kind == "resnet" else rest
    if side == "mid":
        return f"middle_block.{1 if kind == 'attention' else 2 * number}.{rest}"
    if kind == "downsampler":
        return f"input_blocks.{(block + 1) * each}.0.op"
    if kind == "upsampler":
        place = 2 if "CrossAttn" in unet["up_block_types"][block] else 1
        return f"output_blocks.{(block + 1) * each - 1}.{place}.{rest}"
    at = block * each + number
    place = int(kind == "attention")
    counted = f"input_blocks.{at + 1}" if side == "down" else f"output_blocks.{at}"
    return f"{counted}.{place}.{rest}"


class SDXL(SD):
    """prompt_embeds concatenates both encoders' penultimate states along D (section 2.1).

    pooled_prompt_embeds is the second encoder's pooled output, unless the first also projects.
    """

    name = "sdxl"
    pipelines = ("StableDiffusionXLPipeline", "StableDiffusionXLInpaintPipeline")
    text_encoders = (
        family.TextEncoder("text_encoder", ("CLIPTextModel", _PROJECTING)),
        family.TextEncoder("text_encoder_2", (_PROJECTING,), pooled="text_embeds"),
    )
    clip_states: ClassVar[family.ClipStates] = "penultimate"
    inputs = ("prompt_embeds", "pooled_prompt_embeds", "add_time_ids")
    guidance_scale = 5.0
    control_pipeline = "StableDiffusionXLControlNetPipeline"
    pipeline_options: ClassVar[Mapping[str, Any]] = {"add_watermarker": False}
    kohya: ClassVar[family.KohyaNames | None] = family.KohyaNames(
        {"text_encoder": "lora_te1", "text_encoder_2": "lora_te2"},
        lambda layer, unet: family.KohyaLayer(stability_name(layer, unet)),
        lambda unet, prediction_type: family.KohyaBase(
            *("sdxl_base_v1-0", "stable-diffusion-xl-v1-base"),
            "https://github.com/Stability-AI/generative-models",
        ),
    )

    def pooled_outputs(self, projecting: Sequence[bool]) -> tuple[str | None, ...]:
        """Only the first encoder that projects its pooled output counts, as in the pipeline."""
        first = next((row for row, projects in enumerate(projecting) if projects), None)
        return tuple("text_embeds" if row == first else None for row in range(len(projecting)))

    def zero_empty_prompt(self, index: Mapping[str, Any]) -> bool:
        return bool(index.get("force_zeros_for_empty_prompt", True))

    def condition(
        self, samples: Sequence[family.Captioned], guidance_scale: float = 1.0
    ) -> family.Conditioning:
        """Adds `add_time_ids` [B, 6] f32 to the base class's conditioning (section 2.2).

        (original height, width, crop top, left, target height, width) in pixels.
        """
        rows = [item.sample for item in samples]
        sizes = [(*row.original_size, *row.crop_top_left, *row.target_size) for row in rows]
        ids = np.array(sizes, np.float32)
        return super().condition(samples, guidance_scale) | {"add_time_ids": ids}

    def drawing_condition(self, size: tuple[int, int], guidance_scale: float) -> dict[str, Any]:
        return {"add_time_ids": np.array([*size, 0, 0, *size], np.float32)}

    def arguments(self, conditioning: Mapping[str, Any]) -> dict[str, Any]:
        return super().arguments(conditioning) | {
            "added_cond_kwargs": {
                "text_embeds": conditioning["pooled_prompt_embeds"],
                "time_ids": conditioning["add_time_ids"],
            }
        }
