"""The pictures of the demo: handwritten digits in coloured ink on coloured paper."""

from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from demo.palette import STYLES

Split = Literal["train", "held_out", "all"]

SIZE = 32  # width and height of every picture, in pixels
HELD_OUT = 500  # of scikit-learn's 1,797 digits


@cache
def _load_all() -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.bool_]]:
    # Imported on demand: the import lasts a second, and most callers need only captions.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    x8 = (data.images / 16).astype(np.float32)
    labels = data.target.astype(np.int64)
    _, held_out = train_test_split(
        np.arange(len(labels)), test_size=HELD_OUT, random_state=0, stratify=labels
    )
    is_held_out = np.zeros(len(labels), bool)
    is_held_out[held_out] = True
    for array in (x8, labels, is_held_out):
        array.flags.writeable = False  # shared by every caller of this process
    return x8, labels, is_held_out


def load(split: Split = "all") -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Digits [N, 8, 8] in 0..1 and labels [N]: 1,297 for training, 500 held out, or all 1,797."""
    x8, labels, is_held_out = _load_all()
    if split == "all":
        return x8, labels
    keep = is_held_out if split == "held_out" else ~is_held_out
    return x8[keep], labels[keep]


def strokes(
    x8: NDArray[np.float32], rng: np.random.Generator, wobble: float = 1.0
) -> NDArray[np.float32]:
    """Crisp ink coverage [B, 32, 32] in 0..1 of digits [B, 8, 8], slightly warped at random.

    `wobble` scales the random part of the warp: 0 draws every digit straight.
    """
    count = len(x8)
    pad = 4
    cell = 16
    centre = np.array([0, 1.12, 0, 0, 0, 0.42])
    spread = np.array([0.12, 0.08, 0.08, 0.06, 0.12, 0.07]) * wobble
    drawn = centre + spread * rng.uniform(-1, 1, (count, 6))
    angle, scale, right, down, shear, level = drawn.T[:, :, None, None]
    line = (np.arange(SIZE) + 0.5) / SIZE * 2 - 1
    x = line[None, None, :]
    y = line[None, :, None]
    cos = np.cos(angle) * scale
    sin = np.sin(angle) * scale
    columns = (cos * x + (shear - sin) * y + right) * 4 + 3.5 + pad
    rows = (sin * x + cos * y + down) * 4 + 3.5 + pad

    # SciPy warps one tall image of padded cells in a single call. The spline is fitted before the
    # cells are joined, so that no digit affects its neighbours.
    cells = np.pad(x8.astype(np.float64), ((0, 0), (pad, pad), (pad, pad)))
    for axis in (1, 2):
        cells = ndimage.spline_filter1d(cells, order=3, axis=axis)
    tall_rows = rows + cell * np.arange(count)[:, None, None]
    grey = ndimage.map_coordinates(
        cells.reshape(count * cell, cell), [tall_rows, columns], order=3, prefilter=False
    )
    return (1 / (1 + np.exp(-14 * (grey - level)))).astype(np.float32)


def render(
    x8: NDArray[np.float32], style: NDArray[np.integer], rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Pictures [B, 32, 32, 3] of digits [B, 8, 8], each in the style STYLES[style[b]]."""
    ink_rgb = np.array([s.ink_rgb for s in STYLES], np.float32)[style][:, None, None, :]
    paper_rgb = np.array([s.paper_rgb for s in STYLES], np.float32)[style][:, None, None, :]
    cover = strokes(x8, rng)

    # Grain is sampled for every picture, grainy or not: the random stream then does not depend on
    # the styles, and one seed has the same handwriting in each of them.
    coarse = rng.random((len(x8), SIZE // 2, SIZE // 2), np.float32)
    grain = ndimage.zoom(coarse, (1, 2, 2), order=1)
    grainy = np.array([s.grainy for s in STYLES])[style][:, None, None]
    cover = np.where(grainy, cover * np.minimum(0.55 + 0.6 * grain, 1), cover)[..., None]

    light = 1 + rng.uniform(-0.06, 0.06, (len(x8), 1, 1, 1)).astype(np.float32)
    colour = light * (paper_rgb * (1 - cover) + ink_rgb * cover)
    return colour.round().clip(0, 255).astype(np.uint8)
