"""What Qwen's vision-language models read: texts with places for pictures, and the pictures.

It replaces their processors of transformers, which also load a part for videos: that part wants
torchvision, which no environment of a runtime has.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

#: The tokenizer's token for a place; a picture takes one for each merged square of its patches.
IMAGE_TOKEN = "<|image_pad|>"


def load_image_processor(folder: Path) -> Any:
    """The part for pictures of a processor's folder. Raises OSError or ValueError."""
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)


def read_with_pictures(
    tokenizer: Any,
    image_processor: Any,
    texts: Sequence[str],
    pictures: Sequence[Sequence[Image.Image]],
    image_token: str = IMAGE_TOKEN,
) -> dict[str, Any]:
    """The model's inputs of K texts, each with its pictures in the order of their places.

    `mm_token_type_ids` (1: a picture's token) lets transformers 5 number rows and columns of a
    picture's tokens, as the models were trained. Without it they are numbered as text is.

    Returns:
        `input_ids`, `attention_mask` and `mm_token_type_ids` [K, T]; with pictures also
        `pixel_values` [patches, values] and `image_grid_thw` [pictures, 3].
    """
    images: dict[str, Any] = {}
    areas: list[int] = []
    if flat := [picture for own in pictures for picture in own]:
        images = dict(image_processor(images=flat, return_tensors="pt"))
        areas = (images["image_grid_thw"].prod(dim=1) // image_processor.merge_size**2).tolist()
    wide = iter(areas)

    def with_places(text: str) -> str:
        first, *others = text.split(image_token)
        return first + "".join(image_token * next(wide) + part for part in others)

    tokens = tokenizer([with_places(t) for t in texts], padding=True, return_tensors="pt")
    image_id = tokenizer.convert_tokens_to_ids(image_token)
    types = (tokens["input_ids"] == image_id).int()
    return {**tokens, **images, "mm_token_type_ids": types}
