"""Metrics of a set of pictures against a reference set: CMMD, KID, Fréchet, precision, recall.

Each function has the features [N, D] of the pictures and [M, D] of the references. Its bootstrap
draws weights of both sets; matrix products compute all resamples of a kernel metric. Pairs of
pictures are compared by blocks of rows, so that memory grows with the pictures, not their square.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tasks.evaluate.bootstrap import REFERENCES, Estimate, Float64, Resampling
from tasks.evaluate.clip_score import normalise

CMMD_SIGMA = 10.0
CMMD_SCALE = 1000.0
NEIGHBOURS = 3  # k of precision and recall
BLOCK = 512  # pictures that are compared with all others at once
#: Cost limit of the Fréchet bootstrap, resamples x matrix side cubed. Larger problems get fewer
#: resamples, MIN_RESAMPLES at least.
FRECHET_BUDGET = 3e9
MIN_RESAMPLES = 40


def cmmd(images: NDArray[Any], reference: NDArray[Any], resampling: Resampling) -> Estimate:
    """CLIP maximum mean discrepancy.

    Jayasumana et al. 2024 (arXiv 2401.09603): 1000 times the squared MMD with a Gaussian kernel of
    sigma 10, on unit-length features. The V-statistic is exactly 0 for equal sets.
    """
    x, y = normalise(images), normalise(reference)

    def distance(wx: Float64, wy: Float64) -> Float64:
        """Distances [B] for weights [B, N] and [B, M], whose rows sum to 1."""
        xx, yy = _mean(_gaussian, x, x, wx, wx), _mean(_gaussian, y, y, wy, wy)
        return CMMD_SCALE * (xx + yy - 2.0 * _mean(_gaussian, x, y, wx, wy))

    found = _estimate(distance, len(x), len(y), resampling)
    return replace(found, value=max(found.value, 0.0), low=0.0)


def kid(images: NDArray[Any], reference: NDArray[Any], resampling: Resampling) -> Estimate:
    """Kernel inception distance: the unbiased squared MMD with the kernel (x.y / D + 1)³.

    Bińkowski et al. 2018 (arXiv 1801.01401), over all pictures instead of random subsets. It may
    be below 0.

    Raises:
        ValueError: N or M is below 2.
    """
    x, y = images.astype(np.float64), reference.astype(np.float64)
    if min(len(x), len(y)) < 2:
        raise ValueError("the kernel distance needs at least two pictures in each set")

    def distance(wx: Float64, wy: Float64) -> Float64:
        """Distances [B]; a picture is never compared with its own copies in a resample."""
        cross = _mean(_cubic, x, y, wx, wy)
        return _off_diagonal(_cubic, x, wx) + _off_diagonal(_cubic, y, wy) - 2.0 * cross

    return _estimate(distance, len(x), len(y), resampling)


def frechet(images: NDArray[Any], reference: NDArray[Any], resampling: Resampling) -> Estimate:
    """Fréchet distance between Gaussian fits.

    Heusel et al. 2017 (arXiv 1706.08500), on unnormalised features (Kynkäänniemi et al. 2023, arXiv
    2203.06026; Stein et al. 2023, arXiv 2306.04675). Its bias depends on the sample count: compare
    only values of equal n.

    Raises:
        ValueError: N or M is below 2.
    """
    x, y = images.astype(np.float64), reference.astype(np.float64)
    value = frechet_distance(x, y)
    size = min(len(x), len(y), x.shape[1])
    most = max(MIN_RESAMPLES, FRECHET_BUDGET / max(size, 64) ** 3)
    resampling = replace(resampling, count=int(min(resampling.count, most)))
    rows_x = _rows(resampling.counts(len(x)))
    rows_y = _rows(resampling.of_references.counts(len(y), REFERENCES))
    pairs = zip(rows_x, rows_y, strict=True)
    resampled = np.array([frechet_distance(x[a], y[b]) for a, b in pairs])
    return Estimate(value, len(x), resampled, low=0.0, prompts=resampling.clusters)


def frechet_distance(x: Float64, y: Float64) -> float:
    """|mean(x) - mean(y)|² + tr(Cx + Cy - 2 (Cx Cy)^½) for samples [N, D] and [M, D].

    With Cx = A'A and Cy = B'B, tr (Cx Cy)^½ is the sum of the singular values of AB'. This avoids
    the square root of a possibly singular matrix.

    Raises:
        ValueError: N or M is below 2.
    """
    if min(len(x), len(y)) < 2:
        raise ValueError("the Fréchet distance needs at least two pictures in each set")
    a = (x - x.mean(axis=0)) / math.sqrt(len(x) - 1)
    b = (y - y.mean(axis=0)) / math.sqrt(len(y) - 1)
    root = np.linalg.svd(_compact(a) @ _compact(b).T, compute_uv=False).sum()
    shift = ((x.mean(axis=0) - y.mean(axis=0)) ** 2).sum()
    return max(float(shift + (a**2).sum() + (b**2).sum() - 2.0 * root), 0.0)


def precision(images: NDArray[Any], reference: NDArray[Any], resampling: Resampling) -> Estimate:
    """Share of the pictures within the references' manifold: are they realistic.

    Kynkäänniemi et al. 2019 (arXiv 1904.06991): the manifold is the union of balls, one around each
    picture, that reach its third nearest neighbour in the same set.
    """
    inside = _within(images, reference)

    def value(wx: Float64, wy: Float64) -> Float64:
        return np.asarray(((wy > 0) @ inside.T.astype(np.float64) > 0.5) * wx).sum(axis=1)

    found = _estimate(value, len(images), len(reference), resampling)
    return replace(found, is_share=True, counted=len(images))


def recall(images: NDArray[Any], reference: NDArray[Any], resampling: Resampling) -> Estimate:
    """Share of the references within the pictures' manifold: are they as diverse. See precision."""
    inside = _within(reference, images)

    def value(wx: Float64, wy: Float64) -> Float64:
        return np.asarray(((wx > 0) @ inside.T.astype(np.float64) > 0.5) * wy).sum(axis=1)

    found = _estimate(value, len(images), len(reference), resampling)
    return replace(found, is_share=True, counted=len(reference))


class Distance(Protocol):
    """A metric of image features [N, D] and reference features [M, D]."""

    def __call__(
        self, images: NDArray[Any], reference: NDArray[Any], resampling: Resampling
    ) -> Estimate: ...


#: By features of evaluate.image_encoder. CMMD has those of evaluate.clip, by its definition.
DISTANCES: dict[str, Distance] = {
    "fd": frechet,
    "kid": kid,
    "precision": precision,
    "recall": recall,
}
#: By features of evaluate.inception: what torch-fidelity and most papers call FID and KID.
INCEPTION_DISTANCES: dict[str, Distance] = {"fd_inception": frechet, "kid_inception": kid}


Kernel = Callable[[Float64, Float64], Float64]  # of [N, D] and [M, D]: [N, M]


def _estimate(
    value: Callable[[Float64, Float64], Float64],
    n: int,
    m: int,
    resampling: Resampling,
) -> Estimate:
    """The estimate of a function of weights [B, N] and [B, M]."""
    all_equal = value(np.full((1, n), 1 / n), np.full((1, m), 1 / m))
    wx = resampling.weights(n)
    wy = resampling.of_references.weights(m, REFERENCES)
    return Estimate(float(all_equal[0]), n, value(wx, wy), prompts=resampling.clusters)


def _within(points: NDArray[Any], manifold: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each of points [N, D] lies in the ball of each of manifold [M, D]: bool [N, M]."""
    x, y = points.astype(np.float64), manifold.astype(np.float64)
    k = min(NEIGHBOURS, len(y) - 1)
    radii = np.concatenate(  # column 0 is the point itself
        [np.partition(_squared_distances(y[rows], y), k, axis=1)[:, k] for rows in _blocks(len(y))]
    )
    return np.concatenate([_squared_distances(x[rows], y) <= radii for rows in _blocks(len(x))])


def _blocks(count: int) -> Iterator[slice]:
    """Slices of at most BLOCK rows each."""
    for start in range(0, count, BLOCK):
        yield slice(start, start + BLOCK)


def _mean(kernel: Kernel, x: Float64, y: Float64, wx: Float64, wy: Float64) -> Float64:
    """Mean [B] of the kernel over pairs of x [N, D] and y [M, D], for weights [B, N] and [B, M]."""
    found = np.zeros(len(wx))
    for rows in _blocks(len(x)):
        found += ((wx[:, rows] @ kernel(x[rows], y)) * wy).sum(axis=1)
    return found


def _off_diagonal(kernel: Kernel, x: Float64, w: Float64) -> Float64:
    """Mean [B] of the kernel over pairs of different rows of x [N, D], for weights [B, N]."""
    squares = w**2
    diagonal = np.concatenate([np.diag(kernel(x[rows], x[rows])) for rows in _blocks(len(x))])
    total = _mean(kernel, x, x, w, w) - squares @ diagonal
    pairs = 1.0 - squares.sum(axis=1)  # 0 for a resample of one picture only
    return np.divide(total, pairs, out=np.zeros_like(total), where=pairs > 1e-12)


def _rows(drawn: NDArray[np.int64]) -> list[NDArray[np.intp]]:
    """Row numbers of each resample with counts [B, N]."""
    return [np.repeat(np.arange(drawn.shape[1]), count) for count in drawn]


def _compact(a: Float64) -> Float64:
    """A matrix with equal A'A and at most as many rows as columns."""
    return np.asarray(np.linalg.qr(a, mode="r")) if a.shape[0] > a.shape[1] else a


def _gaussian(x: Float64, y: Float64) -> Float64:
    return np.asarray(np.exp(-_squared_distances(x, y) / (2.0 * CMMD_SIGMA**2)))


def _cubic(x: Float64, y: Float64) -> Float64:
    return np.asarray((x @ y.T / x.shape[1] + 1.0) ** 3)


def _squared_distances(x: Float64, y: Float64) -> Float64:
    squared = (x**2).sum(axis=1)[:, None] + (y**2).sum(axis=1) - 2.0 * x @ y.T
    return np.asarray(np.maximum(squared, 0.0))
