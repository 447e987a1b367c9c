"""From the bytes of a picture to the pixels that the VAE sees, and what was done on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from configs.schema import Recipe
from runtimes.contract import WrongInput

Size = tuple[int, int]  # (height, width), pixels


class BadSample(ValueError):
    """A picture that cannot be used; `reason` is what it is counted under."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class TransformSettings:
    """The settings that change pixels or the split; all of them are part of a shard's key."""

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
    scored: bool = False  # a picture without an aesthetic score is a bad one

    @classmethod
    def of(cls, recipe: Recipe) -> TransformSettings:
        names = set(cls.__dataclass_fields__) - {"max_pixels", "scored"}
        settings = recipe.encode.model_dump(include=names)
        scored = getattr(recipe.source, "aesthetic_column", None) is not None
        return cls(**settings, max_pixels=recipe.download.max_pixels, scored=scored)


@dataclass(frozen=True)
class Transformed:
    """A picture as the VAE sees it, with SDXL's micro-conditioning (Podell et al. 2023, 2.2)."""

    pixels: NDArray[np.float32]  # [3, H, W], -1..1
    original_size: Size
    crop_top_left: tuple[int, int]  # in the resized picture, mirrored if it is
    target_size: Size
    flip: bool


def bucket_sizes(settings: TransformSettings, factor: int) -> list[Size]:
    """Sizes that pictures are brought to, for a model whose sides are multiples of `factor`.

    Buckets keep the square's area or a little less, with sides in steps that suit the model, as
    SDXL's do (appendix I of its paper).

    Raises:
        WrongInput: the resolution suits neither the model nor the step.
    """
    side = settings.resolution
    if not settings.aspect_buckets:
        if side % factor:
            raise WrongInput(f"encode.resolution: {side} is no multiple of the model's {factor}")
        return [(side, side)]
    step = math.lcm(settings.bucket_step, factor)
    if side < step:
        raise WrongInput(
            f"encode.bucket_step: steps of {step} pixels (with the model's of {factor}) are "
            f"more than encode.resolution ({side})"
        )
    pairs = {(a, side**2 // a // step * step) for a in range(step, side + 1, step)}
    pairs = {(a, b) for a, b in pairs if max(a, b) <= settings.max_aspect * min(a, b)}
    square = side // step * step
    return sorted(pairs | {(b, a) for a, b in pairs} | {(square, square)})


def nearest_bucket(size: Size, buckets: list[Size]) -> Size:
    """The bucket whose aspect ratio is nearest to the picture's, by its logarithm."""
    aspect = math.log(size[1] / size[0])
    return min(buckets, key=lambda b: (abs(math.log(b[1] / b[0]) - aspect), b))


def decode(data: bytes, max_pixels: int) -> Image.Image:
    """The picture upright and in RGB, transparency over white. Raises BadSample."""
    try:
        image = Image.open(BytesIO(data))
        if image.width * image.height > max_pixels:
            raise BadSample("too many pixels")
        return _to_rgb(ImageOps.exif_transpose(image))
    except (BadSample, MemoryError):
        raise
    except Image.DecompressionBombError:
        raise BadSample("too many pixels") from None
    except Exception:  # Pillow's decoders raise a dozen unrelated types on broken bytes
        raise BadSample("undecodable") from None


def transform(
    data: bytes,
    sha256: bytes,
    meta: Mapping[str, Any],
    settings: TransformSettings,
    buckets: list[Size],
) -> list[Transformed]:
    """Resize a picture to cover its bucket (Lanczos) and cut the overhang off.

    A picture to train on comes mirrored too if the settings say so: mirrored first, then cut at
    the same place. Where the picture had another size before the download stage resized it,
    `original_size` is that one: SDXL conditions on the size before any rescaling.

    Raises:
        BadSample: the picture cannot be used.
    """
    image = decode(data, settings.max_pixels)
    height, width = nearest_bucket((image.height, image.width), buckets)
    scale = max(height / image.height, width / image.width)
    resized = (max(width, round(image.width * scale)), max(height, round(image.height * scale)))
    original_size = _original_size(meta, image)
    if resized != image.size:
        image = image.resize(resized, Image.Resampling.LANCZOS)
    at = _crop_place(settings, sha256)
    top = _round_half_up((image.height - height) * at[0])
    left = _round_half_up((image.width - width) * at[1])
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


def is_holdout(sha256: bytes, share: float) -> bool:
    """Whether a picture is kept from training: chosen by its bytes, so that it always is."""
    return int.from_bytes(sha256[:8], "big") / 2**64 < share


def _crop_place(settings: TransformSettings, sha256: bytes) -> tuple[float, float]:
    """Where the overhang is cut off (0 top or left, 1 bottom or right)."""
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


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # Pillow clips 16-bit grey at 255 rather than scaling it
        grey = np.asarray(image, np.uint16) / 257.0
        return Image.fromarray(grey.round().astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
