"""Masks for training to inpaint: what of a picture is hidden from the model, and painted anew."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Of all masks, those that hide everything: with them the model learns to paint from the caption
#: alone (a quarter, as Stable Diffusion's inpainting models were trained).
EVERYTHING = 0.25
#: Sides of the others, as shares of the picture's.
LEAST, MOST = 0.125, 0.75


def draw_mask(seed: int, sha256: bytes, number: int, size: tuple[int, int]) -> NDArray[np.bool_]:
    """Mask `number` of a picture of `size` (height, width): [H, W], true where it is hidden.

    All of it, a rectangle or an ellipse, as in diffusers' examples for inpainting; a pure function
    of its arguments.
    """
    key = np.random.SeedSequence([seed, int.from_bytes(sha256, "big"), number])
    rng = np.random.Generator(np.random.Philox(key))
    kind, *place = rng.random(5)
    if kind < EVERYTHING:
        return np.ones(size, bool)
    sides = [LEAST + (MOST - LEAST) * share for share in place[:2]]
    begins = [(1 - side) * share for side, share in zip(sides, place[2:], strict=True)]
    # Where pixel centres lie in the shape's own square, from -1 to 1.
    down, across = (
        2 * ((np.arange(length) + 0.5) / length - begin) / side - 1
        for length, begin, side in zip(size, begins, sides, strict=True)
    )
    if kind < (1 + EVERYTHING) / 2:
        return (np.abs(down) <= 1)[:, None] & (np.abs(across) <= 1)
    return down[:, None] ** 2 + across**2 <= 1
