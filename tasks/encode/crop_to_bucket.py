"""From a picture's bytes to the VAE's input: crop, bucket, mask, split and content key.

Buckets are the sizes of pictures that one batch may hold. Masks are random, for inpainting
training. Each picture is cropped to its nearest bucket, and its size and crop are recorded. Content
keys are those of latent shards and of the encode artifact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from artifacts.records import digest_json
from configs.errors import Refused
from configs.settings.data import Encode
from configs.settings.recipe import Recipe
from runtimes.detect_hardware import check_memory
from runtimes.sample.reference_pictures import to_pixels, to_rgb

Size = tuple[int, int]  # (height, width), pixels


def bucket_sizes(settings: TransformSettings, factor: int) -> list[Size]:
    """The target sizes of pictures, sorted.

    The area of a bucket is at most that of the square, as in SDXL (appendix I of its paper).

    Args:
        factor: the model needs sides that are multiples of this many pixels.

    Raises:
        Refused: the resolution does not fit the factor or the bucket step.
    """
    side = settings.resolution
    if not settings.aspect_buckets:
        if side % factor:
            raise Refused(f"encode.resolution: {side} is no multiple of the model's {factor}")
        return [(side, side)]
    step = math.lcm(settings.bucket_step, factor)
    if side < step:
        raise Refused(
            f"encode.bucket_step: its step of {step} pixels (a multiple of the model's {factor}) "
            f"exceeds encode.resolution ({side})"
        )
    pairs = {(a, side**2 // a // step * step) for a in range(step, side + 1, step)}
    pairs = {(a, b) for a, b in pairs if max(a, b) <= settings.max_aspect * min(a, b)}
    square = side // step * step
    return sorted(pairs | {(b, a) for a, b in pairs} | {(square, square)})


def nearest_bucket(size: Size, buckets: list[Size]) -> Size:
    """The bucket with the nearest log aspect ratio."""
    aspect = math.log(size[1] / size[0])
    return min(buckets, key=lambda b: (abs(math.log(b[1] / b[0]) - aspect), b))


#: Fraction of masks that hide the whole picture, as in Stable Diffusion's inpainting training. They
#: teach the model to paint from the caption alone.
FULL_MASKS = 0.25
#: Minimum and maximum side of the other masks, as fractions of the picture's side.
MIN_SIDE = 0.125
MAX_SIDE = 0.75


def draw_mask(seed: int, sha256: bytes, number: int, size: tuple[int, int]) -> NDArray[np.bool_]:
    """A mask bool [H, W], True = hidden: the whole picture, a rectangle or an ellipse.

    The shapes follow diffusers' inpainting examples. The result depends on the arguments only.

    Args:
        sha256: digest of the picture's bytes.
        number: index of the mask among the picture's masks.
        size: (height, width) in pixels.
    """
    key = np.random.SeedSequence([seed, int.from_bytes(sha256, "big"), number])
    rng = np.random.Generator(np.random.Philox(key))
    kind, *uniform = rng.random(5)
    if kind < FULL_MASKS:
        return np.ones(size, bool)
    sides = [MIN_SIDE + (MAX_SIDE - MIN_SIDE) * u for u in uniform[:2]]
    begins = [(1 - side) * u for side, u in zip(sides, uniform[2:], strict=True)]
    # Pixel centres in the coordinates of the shape, which spans -1 to 1.
    down, across = (
        2 * ((np.arange(length) + 0.5) / length - begin) / side - 1
        for length, begin, side in zip(size, begins, sides, strict=True)
    )
    if kind < (1 + FULL_MASKS) / 2:
        return (np.abs(down) <= 1)[:, None] & (np.abs(across) <= 1)
    return down[:, None] ** 2 + across**2 <= 1


def is_holdout(sha256: bytes, fraction: float) -> bool:
    """Whether a picture is held out: a deterministic choice by the sha256 of its download.

    The choice depends neither on URL and caption nor on the stored size and format. No picture
    moves to the other split, and copies of a file are in one split.
    """
    return int.from_bytes(sha256[:8], "big") / 2**64 < fraction


#: Memory of Pillow's decoders and of the copies of their picture.
BYTES_PER_PIXEL = 16


class BadSample(ValueError):
    """An unusable picture; the stage counts it by its text."""


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
    control: bool = False  # whether every sample needs a control picture

    @classmethod
    def of(cls, recipe: Recipe) -> TransformSettings:
        names = set(cls.__dataclass_fields__) & type(recipe.encode).model_fields.keys()
        mode = recipe.download.resize_mode
        return cls(
            **recipe.encode.model_dump(include=names),
            max_pixels=recipe.download.max_pixels,
            scored=getattr(recipe.source, "aesthetic_column", None) is not None,
            download_reshapes=mode if mode in ("center_crop", "border") else None,
            control=getattr(recipe.source, "control", None) is not None,
        )

    @property
    def facts(self) -> dict[str, Any]:
        """The settings by name, for keys; those of before `control` lack it."""
        facts = asdict(self)
        return facts if self.control else {n: v for n, v in facts.items() if n != "control"}


@dataclass(frozen=True)
class Transformed:
    """The VAE's input with SDXL's micro-conditioning (Podell et al. 2023, section 2.2)."""

    pixels: NDArray[np.float32]  # [3, H, W], -1 to 1
    original_size: Size
    crop_top_left: tuple[int, int]  # (top, left) in the whole picture, resized and mirrored alike
    target_size: Size
    flip: bool
    mask: NDArray[np.uint8] | None = None  # of the loss: [H, W], 255 = trained on; None: all is
    control: NDArray[np.uint8] | None = None  # [3, H, W], what a ControlNet reads


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
    image: Image.Image,
    sha256: bytes,
    meta: Mapping[str, Any],
    settings: TransformSettings,
    buckets: list[Size],
    mask: Image.Image | None = None,
    control: Image.Image | None = None,
) -> list[Transformed]:
    """Resize a picture (Lanczos) to cover its nearest bucket, and crop it.

    With `settings.flip`, a training picture has a second variant: mirrored, then cropped at the
    same position. SDXL conditions on the size before any resizing, and on all that is cropped.
    Both are relative to the picture before the download stage if `meta` has its size.

    Args:
        image: a picture of `decode`.
        sha256: that of the downloaded picture; it selects the split and the random crop.
        meta: metadata of the image shard.
        buckets: sizes of `bucket_sizes`.
        mask: of the loss, grey; it is resized (area mean), cropped and mirrored as the picture.
        control: RGB, resized (bilinear, as train_controlnet_sdxl.py of diffusers does), cropped and
            mirrored as the picture.

    Raises:
        BadSample: the picture is too thin for its bucket.
    """
    height, width = nearest_bucket((image.height, image.width), buckets)
    scale = max(height / image.height, width / image.width)
    resized = (max(width, round(image.width * scale)), max(height, round(image.height * scale)))
    if resized[0] * resized[1] > settings.max_pixels:  # a thin picture grows a thousandfold
        raise BadSample("too many pixels")
    original_size, lost = _before_download(meta, image, settings.download_reshapes)
    if resized != image.size:
        image = image.resize(resized, Image.Resampling.LANCZOS)
    if mask is not None and resized != mask.size:
        mask = mask.resize(resized, Image.Resampling.BOX)
    if control is not None and resized != control.size:
        control = control.resize(resized, Image.Resampling.BILINEAR)
    position = _crop_position(settings, sha256)
    top = _round_half_up((image.height - height) * position[0])
    left = _round_half_up((image.width - width) * position[1])
    box = (left, top, left + width, top + height)
    before_top, before_left = (_round_half_up(offset * scale) for offset in lost)
    is_mirrored = settings.flip and not is_holdout(sha256, settings.holdout)

    def cropped(picture: Image.Image, flip: bool) -> Image.Image:
        return (ImageOps.mirror(picture) if flip else picture).crop(box)

    return [
        Transformed(
            to_pixels(cropped(image, flip)),
            original_size,
            (before_top + top, before_left + left),
            (height, width),
            flip,
            None if mask is None else np.asarray(cropped(mask, flip)),
            None if control is None else np.asarray(cropped(control, flip)).transpose(2, 0, 1),
        )
        for flip in ((False, True) if is_mirrored else (False,))
    ]


def area_mean(mask: NDArray[np.uint8], size: Size) -> NDArray[np.uint8]:
    """A mask [H, W], reduced to `size`, whose sides divide its own."""
    height, width = size
    parts = mask.reshape(height, len(mask) // height, width, -1)
    return np.rint(parts.mean((1, 3))).astype(np.uint8)


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
    height = meta.get("original_height")
    width = meta.get("original_width")
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


STAGE: Final = "encode"
#: Increment when the content of a latent shard changes.
VERSION = 5


def settings_for_key(recipe: Recipe) -> dict[str, Any]:
    """The settings that affect latents; the batch size does, by rounding."""
    return recipe.encode.key_settings() | TransformSettings.of(recipe).facts


def shard_key(
    tar_sha256: str,
    encoders: str,
    encode: Encode,
    settings: TransformSettings,
    rows: str | None = None,
    captions: Mapping[str, Any] | None = None,
) -> str:
    """Key (sha256 hex) of an image shard's latent shard.

    Args:
        tar_sha256: digest of the image shard.
        encoders: digest of the VAE and the text encoders.
        rows: those of the image shard that it has; None: all.
        captions: what its captions depend on; None: those of the source.
    """
    facts = {
        "stage": STAGE,
        "version": VERSION,
        "tar": tar_sha256,
        "encoders": encoders,
        "dtype": encode.dtype,
        "batch_size": encode.batch_size,
        "transform": settings.facts,
        "text": encode.text,
        "text_precision": encode.text_precision,
        "rows": rows,
        "captions": captions,
        "changes": None if encode.captions is None else encode.captions.key_settings(),
    }
    chosen = ("text_precision", "rows", "captions", "changes")
    return digest_json({n: v for n, v in facts.items() if v is not None or n not in chosen})
