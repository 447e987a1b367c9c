"""Bytes of picture files."""

from io import BytesIO

import numpy as np
from PIL import Image


def encode_picture(image: Image.Image, kind: str = "png", **options: object) -> bytes:
    """The bytes of a picture file."""
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def plain_picture(width: int, height: int, red: int = 0) -> bytes:
    """A PNG of one colour."""
    return encode_picture(Image.new("RGB", (width, height), (red, 60, 90)))


def noise_picture(seed: int, width: int, height: int, **options: object) -> bytes:
    """A PNG of random levels, which no codec makes much smaller."""
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return encode_picture(Image.fromarray(levels), **options)
