"""Statistics of pictures: CLIPScore, CMMD, Fréchet distance, shares, each with a 95% interval.

Every metric is {"value": float, "n": int, "ci": [low, high]}. Intervals are percentile bootstrap
(Efron & Tibshirani 1993, ch. 13) over the stated number of "resamples"; shares of yes and no have
Wilson's (1927).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Metric = dict[str, Any]
Float64 = NDArray[np.float64]
LEVEL = 0.95
CMMD_SIGMA = 10.0
CMMD_SCALE = 1000.0
#: An eigenvalue problem of this size (cubed) is solved in a few milliseconds; above it, resamples
#: of the Fréchet distance are cut down to LEAST_RESAMPLES.
FRECHET_BUDGET = 3e9
LEAST_RESAMPLES = 40


def mean(values: NDArray[Any], resamples: int, seed: int) -> Metric:
    """Mean of values [N], resampled by value."""
    values = values.astype(np.float64)
    if len(values) == 0:
        raise ValueError("no values to take the mean of")
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(values), size=(resamples, len(values)))
    return _metric(float(values.mean()), len(values), values[drawn].mean(axis=1))


def clip_scores(images: NDArray[Any], texts: NDArray[Any]) -> Float64:
    """100 * max(cos, 0) of each picture's CLIP features [N, D] and its prompt's [N, D].

    CLIPScore (Hessel et al. 2021, arXiv 2104.08718) with w = 100 rather than 2.5, as torchmetrics
    and most papers that report it for text-to-image have it.
    """
    cosine = (normalise(images) * normalise(texts)).sum(axis=1)
    return 100.0 * np.maximum(cosine, 0.0)


def cmmd(images: NDArray[Any], reference: NDArray[Any], resamples: int, seed: int) -> Metric:
    """CLIP maximum mean discrepancy of features [N, D] from a reference's [M, D].

    Jayasumana et al. 2024 (arXiv 2401.09603): squared MMD with a Gaussian kernel, sigma 10, times
    1000, on features normalised to length 1, as a V-statistic: equal sets give exactly 0.
    """
    x, y = normalise(images), normalise(reference)
    k_xx, k_yy, k_xy = _kernel(x, x), _kernel(y, y), _kernel(x, y)

    def distance(wx: Float64, wy: Float64) -> Float64:
        """For rows of weights [B, N] and [B, M], each with sum 1: [B]."""
        xx = ((wx @ k_xx) * wx).sum(axis=1)
        yy = ((wy @ k_yy) * wy).sum(axis=1)
        return CMMD_SCALE * (xx + yy - 2.0 * ((wx @ k_xy) * wy).sum(axis=1))

    value = float(distance(np.full((1, len(x)), 1 / len(x)), np.full((1, len(y)), 1 / len(y)))[0])
    rng = np.random.default_rng(seed)
    drawn = distance(_weights(rng, resamples, len(x)), _weights(rng, resamples, len(y)))
    return _metric(max(value, 0.0), len(x), _unbiased(drawn, value))


def frechet(images: NDArray[Any], reference: NDArray[Any], resamples: int, seed: int) -> Metric:
    """Fréchet distance of Gaussians fitted to features [N, D] and a reference's [M, D].

    Heusel et al. 2017 (arXiv 1706.08500), on unnormalised CLIP features as Kynkäänniemi et al. 2023
    (arXiv 2203.06026) have it. With fewer samples than features it is far too high; compare only
    values of the same n.
    """
    x, y = images.astype(np.float64), reference.astype(np.float64)
    value = frechet_distance(x, y)
    size = min(len(x), len(y), x.shape[1])
    resamples = int(min(resamples, max(LEAST_RESAMPLES, FRECHET_BUDGET / max(size, 64) ** 3)))
    rng = np.random.default_rng(seed)

    def again(features: Float64) -> Float64:
        return features[rng.integers(len(features), size=len(features))]

    drawn = np.array([frechet_distance(again(x), again(y)) for _ in range(resamples)])
    return _metric(value, len(x), _unbiased(drawn, value))


def frechet_distance(x: Float64, y: Float64) -> float:
    """|mean(x) - mean(y)|² + tr(Cx + Cy - 2 (Cx Cy)^½) for samples [N, D] and [M, D].

    With Cx = A'A and Cy = B'B, the trace of the root is the sum of the singular values of AB',
    which needs no root of a matrix that may be singular.
    """
    if min(len(x), len(y)) < 2:
        raise ValueError("the Fréchet distance needs at least two pictures on each side")
    a = (x - x.mean(axis=0)) / math.sqrt(len(x) - 1)
    b = (y - y.mean(axis=0)) / math.sqrt(len(y) - 1)
    root = np.linalg.svd(_compact(a) @ _compact(b).T, compute_uv=False).sum()
    shift = ((x.mean(axis=0) - y.mean(axis=0)) ** 2).sum()
    return max(float(shift + (a**2).sum() + (b**2).sum() - 2.0 * root), 0.0)


def share(passed: NDArray[np.bool_]) -> Metric:
    """Share of yes among [N], with Wilson's interval, which holds at 0 and 1 too."""
    n, z = len(passed), 1.959963984540054
    if n == 0:
        raise ValueError("no pictures to judge")
    p = float(np.mean(passed))
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return {"value": p, "n": n, "ci": [max(0.0, centre - half), min(1.0, centre + half)]}


def normalise(features: NDArray[Any]) -> Float64:
    """Features [N, D] at length 1."""
    wide = features.astype(np.float64)
    return np.asarray(wide / np.linalg.norm(wide, axis=1, keepdims=True), np.float64)


def _compact(a: Float64) -> Float64:
    """A matrix of fewer rows with the same A'A."""
    return np.asarray(np.linalg.qr(a, mode="r")) if a.shape[0] > a.shape[1] else a


def _kernel(x: Float64, y: Float64) -> Float64:
    squared = (x**2).sum(axis=1)[:, None] + (y**2).sum(axis=1) - 2.0 * x @ y.T
    return np.asarray(np.exp(-np.maximum(squared, 0.0) / (2.0 * CMMD_SIGMA**2)))


def _weights(rng: np.random.Generator, resamples: int, n: int) -> Float64:
    """How often each of n is drawn in each resample, over n: [resamples, n]."""
    return rng.multinomial(n, np.full(n, 1 / n), size=resamples) / n


def _unbiased(drawn: Float64, value: float) -> Float64:
    """Resampled distances less the bootstrap's estimate of their bias (Efron & Tibshirani, ch. 10).

    A sample drawn with repetition is less spread than its population, which a distance between
    samples takes for a difference: without this, the interval may lie wholly above the value.
    """
    return np.asarray(np.maximum(drawn - (drawn.mean() - value), 0.0))


def _metric(value: float, n: int, drawn: Float64) -> Metric:
    tail = 100.0 * (1.0 - LEVEL) / 2.0
    low, high = np.percentile(drawn, [tail, 100.0 - tail])
    return {"value": value, "n": n, "ci": [float(low), float(high)], "resamples": len(drawn)}


#: A distance between pictures and a reference, and its interval.
Distance = Callable[[NDArray[Any], NDArray[Any], int, int], Metric]
DISTANCES: dict[str, Distance] = {"cmmd": cmmd, "fd": frechet}
