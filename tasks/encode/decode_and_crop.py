"""Transform a picture's bytes to the VAE's input, and record size and crop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from configs.settings.recipe import Recipe
from tasks.encode.buckets import Size, nearest_bucket
from tasks.encode.holdout_split import is_holdout
from tasks.picture_to_rgb import to_rgb


class BadSample(ValueError):
    """An unusable picture; the stage counts it by `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class TransformSettings:
    """The settings that affect pixels or the split; all are part of a shard's key."""

    resolution: int
    aspect_buckets: bool
    bucket_step: int
    max_aspect: float
    crop: str
    flip: bool
    seed: int
    holdout: float
    max_pixels: int
    masks: int = 0
    scored: bool = False  # whether every sample needs an aesthetic score

    @classmethod
    def of(cls, recipe: Recipe) -> TransformSettings:
        names = set(cls.__dataclass_fields__) - {"max_pixels", "scored"}
        settings = recipe.encode.model_dump(include=names)
        scored = getattr(recipe.source, "aesthetic_column", None) is not None
        return cls(**settings, max_pixels=recipe.download.max_pixels, scored=scored)


@dataclass(frozen=True)
class Transformed:
    """The VAE's input with SDXL's micro-conditioning (Podell et al. 2023, section 2.2)."""

    pixels: NDArray[np.float32]  # [3, H, W], -1 to 1
    original_size: Size
    crop_top_left: tuple[int, int]  # (top, left) in the resized and perhaps mirrored picture
    target_size: Size
    flip: bool


def decode(data: bytes, max_pixels: int) -> Image.Image:
    """The picture in RGB, with EXIF orientation applied and transparency over white.

    Raises:
        BadSample: it has more than `max_pixels` pixels or cannot be decoded.
    """
    try:
        image = Image.open(BytesIO(data))
        if image.width * image.height > max_pixels:
            raise BadSample("too many pixels")
        return to_rgb(ImageOps.exif_transpose(image))
    except (BadSample, MemoryError):
        raise
    except Image.DecompressionBombError:
        raise BadSample("too many pixels") from None
    except Exception:  # Pillow's decoders raise many unrelated types on damaged data
        raise BadSample("undecodable") from None


def transform(
    data: bytes,
    sha256: bytes,
    meta: Mapping[str, Any],
    settings: TransformSettings,
    buckets: list[Size],
) -> list[Transformed]:
    """Resize a picture (Lanczos) to cover its nearest bucket, and crop it.

    With `settings.flip`, a training picture has a second variant: mirrored, then cropped at the
    same position. SDXL conditions on the size before any resizing, so `original_size` is the size
    before the download stage if `meta` has it.

    Args:
        data: encoded picture.
        sha256: of the downloaded picture; it selects the split and the random crop.
        meta: metadata of the image shard.
        buckets: sizes of `bucket_sizes`.

    Raises:
        BadSample: the picture is unusable.
    """
    image = decode(data, settings.max_pixels)
    height, width = nearest_bucket((image.height, image.width), buckets)
    scale = max(height / image.height, width / image.width)
    resized = (max(width, round(image.width * scale)), max(height, round(image.height * scale)))
    if resized[0] * resized[1] > settings.max_pixels:  # a thin picture grows a thousandfold
        raise BadSample("too many pixels")
    original_size = _original_size(meta, image)
    if resized != image.size:
        image = image.resize(resized, Image.Resampling.LANCZOS)
    position = _crop_position(settings, sha256)
    top = _round_half_up((image.height - height) * position[0])
    left = _round_half_up((image.width - width) * position[1])
    box = (left, top, left + width, top + height)
    is_mirrored = settings.flip and not is_holdout(sha256, settings.holdout)
    return [
        Transformed(
            _pixels((ImageOps.mirror(image) if flip else image).crop(box)),
            original_size,
            (top, left),
            (height, width),
            flip,
        )
        for flip in ((False, True) if is_mirrored else (False,))
    ]


def _pixels(image: Image.Image) -> NDArray[np.float32]:
    pixels = np.asarray(image, np.float32).transpose(2, 0, 1) / 255.0 * 2.0 - 1.0
    return np.ascontiguousarray(pixels)


def _crop_position(settings: TransformSettings, sha256: bytes) -> tuple[float, float]:
    """Vertical and horizontal position of the crop: 0 top or left, 1 bottom or right."""
    if settings.crop != "random":
        return 0.5, 0.5
    key = np.random.SeedSequence([settings.seed, int.from_bytes(sha256, "big")])
    top, left = np.random.Generator(np.random.Philox(key)).random(2)
    return float(top), float(left)


def _round_half_up(value: float) -> int:
    return math.floor(value + 0.5)


def _original_size(meta: Mapping[str, Any], image: Image.Image) -> Size:
    height, width = meta.get("original_height"), meta.get("original_width")
    known = isinstance(height, int) and isinstance(width, int) and height > 0 and width > 0
    return (height, width) if known else (image.height, image.width)  # type: ignore[return-value]
