"""Rotate a picture upright by its EXIF orientation, and decode a large JPEG at a reduced scale."""

from __future__ import annotations

import math
from io import BytesIO
from typing import Any, NamedTuple

from configs.settings.data import Download
from tasks.download.decoding_bomb_checks import Header, known_formats
from tasks.download.retryable_and_final_failures import FetchFailed
from tasks.picture_to_rgb import to_rgb

ORIENTATION = 0x0112  # EXIF tag; 1 is upright
TRANSPOSED = range(5, 9)
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
#: Part of Pillow's names of layouts with 16 bits per channel, such as RGB;16B.
DEEP = ";16"
#: Scales at which JPEG decoders compute fewer pixels per block (1/2, 1/4 and 1/8).
REDUCTIONS = (8, 4, 2)
#: Photographs with this margin differ from those resized from the whole as much as two good filters
#: (area, Lanczos) differ: by 35 to 43 dB.
MARGIN = 2


def reduction(header: Header, settings: Download) -> int:
    """How many times smaller a JPEG is decoded, per side: 1, 2, 4 or 8.

    The reduced picture has at least MARGIN times the sides of the stored one, whose size is that of
    a picture resized from the whole.
    """
    if settings.resize_mode == "no" or not header.is_reducible:
        return 1
    fixed = max if settings.resize_mode in ("border", "keep_ratio_largest") else min

    def stored(scale: int) -> list[int]:
        sides = [math.ceil(side / scale) for side in (header.width, header.height)]
        return [round(side * settings.image_size / fixed(sides)) for side in sides]

    least = MARGIN * settings.image_size
    side = fixed(header.width, header.height)
    return next((n for n in REDUCTIONS if side >= n * least and stored(n) == stored(1)), 1)


class Upright(NamedTuple):
    """An upright picture and its size in pixels before it was reduced."""

    body: bytes
    width: int
    height: int


def rotate_and_reduce(body: bytes, reduction: int = 1) -> Upright:
    """The upright picture: `body` itself if nothing changes, else PNM or uncompressed PNG.

    img2dataset drops the EXIF tag, clips channels of 16 bits at 255, and shows a transparent grey.

    Args:
        reduction: how many times smaller a JPEG is decoded, per side: 1, 2, 4 or 8.

    Raises:
        FetchFailed: the picture cannot be decoded, perhaps for want of memory.
        MemoryError: this process lacks memory.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(BytesIO(body), formats=known_formats()) as image:
            is_misread = _is_misread(image)
            orientation = _orientation(image)  # loads a PNG
            width, height = image.size
            size = (height, width) if orientation in TRANSPOSED else (width, height)
            if orientation == 1 and reduction == 1 and not is_misread:
                return Upright(body, *size)
            if reduction > 1:
                image.draft(None, (width // reduction, height // reduction))
            upright = ImageOps.exif_transpose(image) if orientation > 1 else image
            if is_misread:
                upright = to_rgb(upright)
            elif upright.mode not in PNG_MODES:
                upright = upright.convert("RGB")
            buffer = BytesIO()
            if upright.mode in ("L", "RGB"):  # decoded again at once
                upright.save(buffer, "PPM")
            else:
                upright.save(buffer, "PNG", compress_level=0)
            return Upright(buffer.getvalue(), *size)
    except MemoryError:
        raise
    except Exception:  # any type, as in `check_picture`
        raise FetchFailed("not an image") from None


def _is_misread(image: Any) -> bool:
    """Whether img2dataset would change the colours of a picture that is not loaded yet.

    Raises:
        ValueError: the values of its pixels have no known range.
    """
    layouts = (repr(tile) for tile in image.tile)
    is_deep = DEEP in image.mode or any(DEEP in layout for layout in layouts)
    if image.mode in ("F", "I") and not is_deep:
        raise ValueError(f"pixels of mode {image.mode}")  # of no known range
    if image.format == "TIFF":  # OpenCV gives colours that are multiplied by their opacity
        return is_deep or image.mode == "LAB" or bool(image.has_transparency_data)
    return is_deep or (image.mode in ("1", "L") and "transparency" in image.info)


def _orientation(image: Any) -> int:
    try:
        orientation = image.getexif().get(ORIENTATION, 1)
    except MemoryError:
        raise
    except Exception:  # a damaged tag does not make the picture unusable
        return 1
    return orientation if orientation in range(2, 9) else 1
