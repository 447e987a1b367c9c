"""Picture metrics with 95% intervals: CLIPScore, CMMD, Fréchet distance, proportions.

A metric is {"value": float, "n": int, "ci": [low, high]}. Means and distances have percentile
bootstrap intervals (Efron & Tibshirani 1993, ch. 13) and state the number of "resamples".
Proportions have Wilson score intervals (1927).
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
#: Cost limit of the Fréchet bootstrap, resamples x matrix side cubed. Larger problems get fewer
#: resamples, MIN_RESAMPLES at least.
FRECHET_BUDGET = 3e9
MIN_RESAMPLES = 40


def mean(values: NDArray[Any], resamples: int, seed: int) -> Metric:
    """Mean of values [N] with a bootstrap interval. Raises ValueError if N is 0."""
    values = values.astype(np.float64)
    if len(values) == 0:
        raise ValueError("the mean needs at least one value")
    rng = np.random.default_rng(seed)
    indices = rng.integers(len(values), size=(resamples, len(values)))
    return _metric(float(values.mean()), len(values), values[indices].mean(axis=1))


def clip_scores(images: NDArray[Any], texts: NDArray[Any]) -> Float64:
    """CLIPScore f64 [N]: 100 * max(cos, 0) of image features [N, D] and text features [N, D].

    Hessel et al. 2021 (arXiv 2104.08718), with w = 100 as in torchmetrics instead of 2.5.
    """
    cosine = (normalise(images) * normalise(texts)).sum(axis=1)
    return 100.0 * np.maximum(cosine, 0.0)


def cmmd(images: NDArray[Any], reference: NDArray[Any], resamples: int, seed: int) -> Metric:
    """CLIP maximum mean discrepancy between image features [N, D] and reference features [M, D].

    Jayasumana et al. 2024 (arXiv 2401.09603): 1000 times the squared MMD with a Gaussian kernel of
    sigma 10, on unit-length features. The V-statistic is exactly 0 for equal sets.
    """
    x, y = normalise(images), normalise(reference)
    k_xx, k_yy, k_xy = _kernel(x, x), _kernel(y, y), _kernel(x, y)

    def distance(wx: Float64, wy: Float64) -> Float64:
        """Distances [B] for sample weights [B, N] and [B, M], whose rows sum to 1."""
        xx = ((wx @ k_xx) * wx).sum(axis=1)
        yy = ((wy @ k_yy) * wy).sum(axis=1)
        return CMMD_SCALE * (xx + yy - 2.0 * ((wx @ k_xy) * wy).sum(axis=1))

    value = float(distance(np.full((1, len(x)), 1 / len(x)), np.full((1, len(y)), 1 / len(y)))[0])
    rng = np.random.default_rng(seed)
    resampled = distance(_weights(rng, resamples, len(x)), _weights(rng, resamples, len(y)))
    return _metric(max(value, 0.0), len(x), _unbiased(resampled, value))


def frechet(images: NDArray[Any], reference: NDArray[Any], resamples: int, seed: int) -> Metric:
    """Fréchet distance between Gaussian fits of image [N, D] and reference features [M, D].

    Heusel et al. 2017 (arXiv 1706.08500), on unnormalised CLIP features (Kynkäänniemi et al. 2023,
    arXiv 2203.06026). Its bias depends on the sample count: compare only values of equal n.

    Raises:
        ValueError: N or M is below 2.
    """
    x, y = images.astype(np.float64), reference.astype(np.float64)
    value = frechet_distance(x, y)
    size = min(len(x), len(y), x.shape[1])
    resamples = int(min(resamples, max(MIN_RESAMPLES, FRECHET_BUDGET / max(size, 64) ** 3)))
    rng = np.random.default_rng(seed)

    def resample(features: Float64) -> Float64:
        return features[rng.integers(len(features), size=len(features))]

    resampled = [frechet_distance(resample(x), resample(y)) for _ in range(resamples)]
    return _metric(value, len(x), _unbiased(np.array(resampled), value))


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


def share(passed: NDArray[np.bool_]) -> Metric:
    """Proportion of True in bool [N] with Wilson's score interval, valid at 0 and 1 too.

    Raises:
        ValueError: N is 0.
    """
    from scipy.stats import binomtest

    n = len(passed)
    if n == 0:
        raise ValueError("no pictures to judge")
    interval = binomtest(int(np.sum(passed)), n).proportion_ci(LEVEL, method="wilson")
    return {
        "value": float(np.mean(passed)),
        "n": n,
        "ci": [float(interval.low), float(interval.high)],
    }


def normalise(features: NDArray[Any]) -> Float64:
    """Features f64 [N, D], scaled to unit length."""
    wide = features.astype(np.float64)
    return np.asarray(wide / np.linalg.norm(wide, axis=1, keepdims=True), np.float64)


def _compact(a: Float64) -> Float64:
    """A matrix with equal A'A and at most as many rows as columns."""
    return np.asarray(np.linalg.qr(a, mode="r")) if a.shape[0] > a.shape[1] else a


def _kernel(x: Float64, y: Float64) -> Float64:
    squared = (x**2).sum(axis=1)[:, None] + (y**2).sum(axis=1) - 2.0 * x @ y.T
    return np.asarray(np.exp(-np.maximum(squared, 0.0) / (2.0 * CMMD_SIGMA**2)))


def _weights(rng: np.random.Generator, resamples: int, n: int) -> Float64:
    """Bootstrap weights f64 [resamples, n]: multinomial counts divided by n."""
    return rng.multinomial(n, np.full(n, 1 / n), size=resamples) / n


def _unbiased(resampled: Float64, value: float) -> Float64:
    """Resampled distances minus the bootstrap estimate of bias (Efron & Tibshirani, ch. 10).

    Resamples with replacement have less spread than the sample, which increases the distance.
    Without the correction the whole interval may lie above the value.
    """
    return np.asarray(np.maximum(resampled - (resampled.mean() - value), 0.0))


def _metric(value: float, n: int, resampled: Float64) -> Metric:
    tail = 100.0 * (1.0 - LEVEL) / 2.0
    low, high = np.percentile(resampled, [tail, 100.0 - tail])
    return {"value": value, "n": n, "ci": [float(low), float(high)], "resamples": len(resampled)}


#: A distance metric: (image features, reference features, resamples, seed) -> metric.
Distance = Callable[[NDArray[Any], NDArray[Any], int, int], Metric]
DISTANCES: dict[str, Distance] = {"cmmd": cmmd, "fd": frechet}
