"""Control pictures of a drawing: from files or URLs to the pixels that a ControlNet reads."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

import fsspec
import numpy as np
from numpy.typing import NDArray

from artifacts.errors import refusals
from artifacts.records import digest_bytes
from configs.errors import Refused


def read_controls(urls: Sequence[str], size: tuple[int, int]) -> NDArray[np.float32]:
    """Control pictures [B, 3, H, W] f32 in 0..1.

    A picture of another size is resized (bilinear) to cover `size`, and cropped at its centre, as
    the encode stage does with training pictures.

    Args:
        urls: B local paths or fsspec URLs.
        size: (height, width) in pixels.

    Raises:
        Refused: a picture is missing or cannot be decoded.
    """
    return np.stack([_read(url, size) for url in urls])


def sha256_of(url: str) -> str:
    """sha256 (hex) of a file. Raises Refused if it is missing."""
    return digest_bytes(_bytes(url))


def _bytes(url: str) -> bytes:
    try:
        with refusals(), fsspec.open(url, "rb") as stream:
            return bytes(stream.read())
    except FileNotFoundError:
        raise Refused(f"control picture {url}: no such file") from None
    except (OSError, ValueError) as error:
        raise Refused(f"control picture {url} cannot be read: {error}") from None


def _read(url: str, size: tuple[int, int]) -> NDArray[np.float32]:
    from PIL import Image, ImageOps

    height, width = size
    data = _bytes(url)
    try:
        image = ImageOps.exif_transpose(Image.open(BytesIO(data))).convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise Refused(f"control picture {url} is no picture: {error}") from None
    if image.size != (width, height):
        image = ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)
    return np.asarray(image, np.float32).transpose(2, 0, 1) / np.float32(255)
