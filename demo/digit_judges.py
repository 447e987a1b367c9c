"""Judges independent of the model: a classifier of ink shapes, and nearest palette colours."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from demo import captions, dataset
from demo.captions import STYLES

if TYPE_CHECKING:
    from sklearn.svm import SVC

BORDER = 2  # width of the edge that counts as paper, in pixels
PASSES = 4  # renderings of each training digit for the classifier
DIRECTIONS = 8


def _distance_from_paper(
    images: NDArray[np.uint8],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Colour distance of each pixel [N, 32, 32] from the paper [N, 3], the border's median."""
    rgb = images.astype(np.float32)
    edge = np.ones(rgb.shape[1:3], bool)
    edge[BORDER:-BORDER, BORDER:-BORDER] = False
    paper = np.median(rgb[:, edge], axis=1)
    return np.linalg.norm(rgb - paper[:, None, None, :], axis=-1), paper


def ink_shape(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Histograms of stroke directions [N, 512] of pictures [N, 32, 32, 3], whatever their colours.

    Eight directions of the ink mask's gradient, pooled to 8 x 8, of unit length (Dalal and Triggs,
    CVPR 2005). They halve the errors of the mask itself on held-out digits.
    """
    count = len(images)
    distance, _ = _distance_from_paper(images)
    half = distance.reshape(count, 16, 2, 16, 2).mean((2, 4))
    ink = half / (np.quantile(half, 0.97, axis=(1, 2), keepdims=True) + 0.1)
    down, right = np.gradient(np.minimum(ink, 1), axis=(1, 2))
    strength = np.hypot(down, right)
    direction = np.arctan2(down, right) * DIRECTIONS / (2 * np.pi)
    pooled = []
    for centre in range(DIRECTIONS):
        away = np.abs((direction - centre + DIRECTIONS / 2) % DIRECTIONS - DIRECTIONS / 2)
        share = strength * np.maximum(1 - away, 0)
        pooled.append(ndimage.gaussian_filter(share, (0, 1, 1))[:, 1::2, 1::2])
    shape = np.stack(pooled, axis=1).reshape(count, -1)
    shape /= np.linalg.norm(shape, axis=1, keepdims=True) + 1e-6
    return shape.astype(np.float32)


def nearest_style(images: NDArray[np.uint8]) -> NDArray[np.intp]:
    """The style [N] whose ink and paper colours are nearest to each picture's own."""
    distance, paper = _distance_from_paper(images)
    threshold = 0.8 * np.quantile(distance, 0.97, axis=(1, 2))[:, None, None]
    is_ink = (distance >= threshold)[..., None]
    ink = (images * is_ink).sum((1, 2)) / is_ink.sum((1, 2))
    palette = np.array([(*s.ink_rgb, *s.paper_rgb) for s in STYLES], np.float32)
    colours = np.concatenate([ink, paper], axis=1)
    return np.linalg.norm(colours[:, None] - palette, axis=-1).argmin(1)


@cache
def _classifier() -> "SVC":
    """A digit classifier, fitted once on the training split in mixed styles (a few seconds)."""
    from sklearn.svm import SVC

    x8, labels = dataset.load("train")
    rng = np.random.default_rng(1)
    shapes = [
        ink_shape(dataset.render(x8, rng.integers(len(STYLES), size=len(x8)), rng))
        for _ in range(PASSES)
    ]
    return SVC(C=10, gamma="scale").fit(np.concatenate(shapes), np.tile(labels, PASSES))


def judge_digit(
    images: NDArray[np.uint8],
    prompts: Sequence[str],
    references: Sequence[NDArray[np.uint8] | None] = (),
) -> NDArray[np.bool_]:
    """Whether each picture shows the digit of its prompt, bool [N].

    A prompt that names none asks for that of its reference, by the same classifier.

    Args:
        images: u8 [N, 32, 32, 3].
        prompts: N captions of `demo.captions`.
        references: N pictures u8 [32, 32, 3], or None; none at all: no prompt has one.

    Raises:
        ValueError: a shape is wrong, `captions.parse` cannot read a prompt, or neither prompt nor
            reference has a digit.
    """
    asked = _parse(images, prompts)
    if not asked:
        return np.zeros(0, bool)
    wanted = np.array([-1 if a.digit is None else a.digit for a in asked])
    unnamed = np.flatnonzero(wanted < 0)
    shown = []
    for n in unnamed.tolist():
        reference = references[n] if n < len(references) else None
        if reference is None or reference.shape != images.shape[1:]:
            words = f"{prompts[n]!r} names no digit: it needs a reference of 32 x 32 pixels"
            raise ValueError(words)
        shown.append(reference)
    if shown:
        wanted[unnamed] = _classifier().predict(ink_shape(np.stack(shown)))
    return np.asarray(_classifier().predict(ink_shape(images)) == wanted)


def judge_style(images: NDArray[np.uint8], prompts: Sequence[str]) -> NDArray[np.bool_]:
    """Whether each picture has the colours of its prompt, bool [N]; arguments as `judge_digit`.

    A prompt without ink or paper accepts any.
    """
    asked = _parse(images, prompts)
    if not asked:
        return np.zeros(0, bool)
    styles = zip(nearest_style(images), asked, strict=True)
    return np.array([style in a.styles() for style, a in styles])


def _parse(images: NDArray[np.uint8], prompts: Sequence[str]) -> list[captions.Asked]:
    shape = (len(prompts), dataset.SIZE, dataset.SIZE, 3)
    if images.shape != shape or images.dtype != np.uint8:
        raise ValueError(
            f"expected uint8 pictures {shape}, one per prompt; got {images.dtype} {images.shape}"
        )
    return [captions.parse(prompt, has_reference=True) for prompt in prompts]
