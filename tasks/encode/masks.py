"""Random masks for inpainting training."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Fraction of masks that hide the whole picture, as in Stable Diffusion's inpainting training. They
#: teach the model to paint from the caption alone.
FULL_MASKS = 0.25
#: Minimum and maximum side of the other masks, as fractions of the picture's side.
MIN_SIDE, MAX_SIDE = 0.125, 0.75


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
