"""Transform a picture's bytes to the VAE's input, and record size and crop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from configs.settings.recipe import Recipe
from runtimes.process.memory import check_memory
from tasks.encode.buckets import Size, nearest_bucket
from tasks.encode.holdout_split import is_holdout
from tasks.picture_to_rgb import to_rgb

#: Memory of Pillow's decoders and of the copies of their picture.
BYTES_PER_PIXEL = 16


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
    #: The download's resize mode, if it crops or pads: center_crop or border.
    download_reshapes: str | None = None

    @classmethod
    def of(cls, recipe: Recipe) -> TransformSettings:
        names = set(cls.__dataclass_fields__) & type(recipe.encode).model_fields.keys()
        mode = recipe.download.resize_mode
        return cls(
            **recipe.encode.model_dump(include=names),
            max_pixels=recipe.download.max_pixels,
            scored=getattr(recipe.source, "aesthetic_column", None) is not None,
            download_reshapes=mode if mode in ("center_crop", "border") else None,
        )

    def for_key(self) -> dict[str, Any]:
        """All fields; keys without `download_reshapes` are those of releases that lack it."""
        found = asdict(self)
        if self.download_reshapes is None:
            del found["download_reshapes"]
        return found


@dataclass(frozen=True)
class Transformed:
    """The VAE's input with SDXL's micro-conditioning (Podell et al. 2023, section 2.2)."""

    pixels: NDArray[np.float32]  # [3, H, W], -1 to 1
    original_size: Size
    crop_top_left: tuple[int, int]  # (top, left) in the whole picture, resized and mirrored alike
    target_size: Size
    flip: bool


def decode(data: bytes, max_pixels: int) -> Image.Image:
    """The picture in RGB, with EXIF orientation applied and transparency over white.

    Raises:
        BadSample: it has more than `max_pixels` pixels or cannot be decoded.
        MemoryError: this process lacks the memory for so many pixels.
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
        check_memory(BYTES_PER_PIXEL * max_pixels)
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
    same position. SDXL conditions on the size before any resizing and on all that is cropped, so
    size and crop are relative to the picture before the download stage if `meta` has its size.

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
    original_size, cropped = _before_download(meta, image, settings.download_reshapes)
    if resized != image.size:
        image = image.resize(resized, Image.Resampling.LANCZOS)
    position = _crop_position(settings, sha256)
    top = _round_half_up((image.height - height) * position[0])
    left = _round_half_up((image.width - width) * position[1])
    box = (left, top, left + width, top + height)
    before_top, before_left = (_round_half_up(offset * scale) for offset in cropped)
    is_mirrored = settings.flip and not is_holdout(sha256, settings.holdout)
    return [
        Transformed(
            _pixels((ImageOps.mirror(image) if flip else image).crop(box)),
            original_size,
            (before_top + top, before_left + left),
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


def _before_download(
    meta: Mapping[str, Any], image: Image.Image, reshapes: str | None
) -> tuple[Size, tuple[float, float]]:
    """The size before the download, and how far it cropped at the top and left.

    Padding counts as part of the picture.

    Returns (height, width) in pixels of the original, and (top, left) in pixels of `image`.
    """
    height, width = meta.get("original_height"), meta.get("original_width")
    if not (isinstance(height, int) and isinstance(width, int) and height > 0 and width > 0):
        return (image.height, image.width), (0.0, 0.0)
    if reshapes == "border":
        scale = max(height, width) / max(image.height, image.width)
        return (round(image.height * scale), round(image.width * scale)), (0.0, 0.0)
    if reshapes == "center_crop":
        scale = max(image.height / height, image.width / width)
        lost = (height * scale - image.height, width * scale - image.width)
        return (height, width), (lost[0] / 2, lost[1] / 2)
    return (height, width), (0.0, 0.0)
