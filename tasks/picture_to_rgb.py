"""Convert a decoded picture of any mode to RGB."""

from __future__ import annotations

import numpy as np
from PIL import Image


def to_rgb(image: Image.Image) -> Image.Image:
    """The picture with 8 bits per channel, transparent parts over white."""
    if image.mode.startswith("I;16"):  # Pillow would clip 16-bit grey at 255, not scale it
        grey = np.asarray(image, np.uint16) / 257.0
        return Image.fromarray(grey.round().astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
