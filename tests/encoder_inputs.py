"""Settings and pictures of the tests of the encode stage."""

from dataclasses import replace

import numpy as np
from picture_bytes import encode_picture
from PIL import Image

from tasks.encode.crop_to_bucket import TransformSettings

SQUARE = TransformSettings(
    resolution=64,
    aspect_buckets=False,
    bucket_step=16,
    max_aspect=2.0,
    crop="center",
    flip=False,
    seed=0,
    holdout=0.1,
    max_pixels=1_000_000,
)
BUCKETS = replace(SQUARE, aspect_buckets=True)


def gradient(width: int, height: int) -> bytes:
    """Red increases to the right, green downwards."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return encode_picture(Image.fromarray(np.stack([x, y, 0 * x], -1).astype(np.uint8)))
