"""Qwen-Image-Edit 2509 and 2511: Qwen-Image with references, which its Qwen2.5-VL sees, too.

The reference is diffusers' QwenImageEditPlusPipeline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from PIL.Image import Image, Resampling

from runtimes.families import family
from runtimes.families.qwen_image import QwenImage

#: Pixels of a reference for the Qwen2.5-VL; 2 x 2 tokens of the transformer have 32 pixels a side.
CONDITION_PIXELS, SIDE_STEP = 384 * 384, 32


class QwenImageEdit(QwenImage):
    """prompt_embeds are of a caption and the references; the denoiser gets their latents, too."""

    name = "qwen_image_edit"
    pipelines = ("QwenImageEditPlusPipeline",)
    plain_pipeline = "QwenImagePipeline"
    kohya = family.KohyaNames(
        *({}, lambda layer, config: family.KohyaLayer(layer)),
        lambda transformer, prediction_type: family.KohyaBase(
            *("qwen_image_edit", "Qwen-Image-Edit", "https://github.com/QwenLM/Qwen-Image")
        ),
        *("musubi-tuner", "networks.lora_qwen_image"),
    )
    max_references = 3  # with more, the published model was not trained
    text_encoders = (
        family.TextEncoder(
            *("text_encoder", ("Qwen2_5_VLForConditionalGeneration",), "llm"),
            tokens=1024,
            call_tokens=512,  # which the pipeline checks, and does not cut captions to
            prefix=64,
            padded=False,
            processor="processor",
        ),
    )

    def chat_with_pictures(self, tokenizer: Any, caption: str, pictures: int) -> str:
        places = (
            f"Picture {number}: <|vision_start|><|image_pad|><|vision_end|>"
            for number in range(1, pictures + 1)
        )
        return self.chat(tokenizer, "".join(places) + caption)

    @contextmanager
    def reading(self, denoiser: Any, references: Sequence[Any]) -> Iterator[None]:
        import torch

        patches = [family.pack(latents) for latents in references]
        more = [(1, *(side // family.PATCH for side in r.shape[-2:])) for r in references]
        own = denoiser.forward

        def forward(hidden_states: Any, img_shapes: Any, **named: Any) -> tuple[Any, ...]:
            tokens = torch.cat([hidden_states, *(p.to(hidden_states.dtype) for p in patches)], 1)
            shapes = [[*of_picture, *more] for of_picture in img_shapes]
            predicted, *others = own(hidden_states=tokens, img_shapes=shapes, **named)
            return predicted[:, : hidden_states.shape[1]], *others

        with family.calling(denoiser, forward):
            yield

    def condition_picture(self, image: Image) -> Image:
        height, width = area_size((image.height, image.width), CONDITION_PIXELS)
        return image.resize((width, height), Resampling.LANCZOS)


def area_size(size: tuple[int, int], pixels: int) -> tuple[int, int]:
    """The (height, width) nearest to an area of `pixels` in the shape of `size`, in whole steps."""
    height, width = size
    ratio = width / height
    wide = math.sqrt(pixels * ratio)
    return round(wide / ratio / SIDE_STEP) * SIDE_STEP, round(wide / SIDE_STEP) * SIDE_STEP
