"""diffusers' QwenImageEditPlusPipeline on the tiny model, as its code means it.

Its processor wants torchvision, which the tests' environment lacks, so that a stand-in replaces it.
The pipeline of diffusers 0.42.1 does not pass `mm_token_type_ids`, without which transformers 5
numbers a picture's tokens as text (diffusers issue 14194); the text encoder here gets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as code
from PIL import Image
from transformers import BatchFeature, Qwen2Tokenizer, Qwen2VLImageProcessorPil

PLACE = "<|image_pad|>"


class Processor:
    """Qwen2VLProcessor without videos, for one text."""

    def __init__(self, folder: Path) -> None:
        self._pictures = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self._tokenizer = Qwen2Tokenizer.from_pretrained(folder)
        self.last: torch.Tensor | None = None  # mm_token_type_ids

    def __call__(self, text: list[str], images: Any, **options: Any) -> BatchFeature:
        (prompt,) = text
        found: dict[str, Any] = {}
        if images:
            found = dict(self._pictures(images=images, return_tensors="pt"))
            for _, rows, columns in found["image_grid_thw"].tolist():
                prompt = prompt.replace(PLACE, "<place>" * (rows * columns // 4), 1)
            prompt = prompt.replace("<place>", PLACE)
        tokens = self._tokenizer([prompt], **options)
        is_picture = tokens["input_ids"] == self._tokenizer.convert_tokens_to_ids(PLACE)
        self.last = is_picture.int()
        return BatchFeature({**tokens, **found})


class Pipeline(QwenImageEditPlusPipeline):
    """With a function of its call."""

    def condition_image(self, picture: Image.Image) -> Image.Image:
        width, height = code.calculate_dimensions(
            code.CONDITION_IMAGE_SIZE, picture.width / picture.height
        )
        resized: Image.Image = self.image_processor.resize(picture, height, width)
        return resized


def open_pipeline(folder: Path) -> Any:
    pipe = Pipeline.from_pretrained(folder, processor=None)
    pipe.processor = processor = Processor(folder / "processor")

    def forward(module: torch.nn.Module, args: Any, named: dict[str, Any]) -> Any:
        return args, {**named, "mm_token_type_ids": processor.last}

    pipe.text_encoder.register_forward_pre_hook(forward, with_kwargs=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pictures_of(sizes: Sequence[tuple[int, int]]) -> list[Image.Image]:
    """Pictures of smooth random colours, by (height, width)."""
    rng = np.random.default_rng(3)
    coarse = [rng.integers(0, 256, (5, 4, 3), np.uint8) for _ in sizes]
    return [
        Image.fromarray(levels).resize((width, height), Image.Resampling.BICUBIC)
        for levels, (height, width) in zip(coarse, sizes, strict=True)
    ]


def predict_as_pipeline(
    model: Any,
    noisy: torch.Tensor,
    timesteps: torch.Tensor,
    prompts: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
) -> torch.Tensor:
    """The arithmetic of the pipeline's loop: each sample alone, as the pipeline takes them."""
    pack = QwenImageEditPlusPipeline._pack_latents
    predictions = []
    for row, prompt in enumerate(prompts):
        pictures = [latents[row : row + 1] for latents in (noisy, *references)]
        tokens = [pack(latents, *latents.shape) for latents in pictures]
        shapes = [(1, latents.shape[2] // 2, latents.shape[3] // 2) for latents in pictures]
        output = model(
            hidden_states=torch.cat(tokens, dim=1),
            timestep=timesteps[row : row + 1] / 1000,
            guidance=None,
            encoder_hidden_states_mask=None,
            encoder_hidden_states=prompt[None],
            img_shapes=[shapes],
            return_dict=False,
        )[0][:, : tokens[0].shape[1]]
        height, width = noisy.shape[2:]
        unpacked = QwenImageEditPlusPipeline._unpack_latents(output, 4 * height, 4 * width, 4)
        predictions.append(unpacked.squeeze(2))
    return torch.cat(predictions)
