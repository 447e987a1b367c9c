"""Metrics of pictures: distances of sets, means and shares, and their bootstrap intervals.

Resample b has the same pictures for every model and metric with n pictures, because its weights
depend on seed, n and prompts alone. The difference of two resampled metrics is therefore a paired
bootstrap (Efron & Tibshirani 1993, ch. 8 and 13). Pictures of one prompt resemble each other. A
prompt with several pictures is therefore resampled with all of them (cluster bootstrap: Davison &
Hinkley 1997, sec. 3.8).

CMMD, KID, Fréchet, precision and recall compare a set of pictures with a reference set. Each
function has the features [N, D] of the pictures and [M, D] of the references. Its bootstrap draws
weights of both sets; matrix products compute all resamples of a kernel metric. Pairs of pictures
are compared by blocks of rows, so that memory grows with the pictures, not their square.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from io import BytesIO
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


def normalise(features: NDArray[Any]) -> Float64:
    """Features f64 [N, D], scaled to unit length; rows of zeros stay."""
    wide = features.astype(np.float64)
    length = np.linalg.norm(wide, axis=1, keepdims=True)
    return np.asarray(wide / np.where(length > 0, length, 1.0), np.float64)


#: A metric in metrics.json: {"value", "n", "ci": [low, high] or None, "resamples", "interval"},
#: and "prompts" and "counted" of an Estimate that has them.
Metric = dict[str, Any]
#: The number of each picture's prompt.
Prompts = tuple[int, ...]
Interval = tuple[float, float]
LEVEL = 0.95
#: Resamples beyond each end of an interval by percentiles; with fewer, their spread decides.
LEAST_BEYOND = 5
#: A share this near to 0 or 1 is all or none: it is a sum of weights, whose last bits differ.
ROUNDING = 1e-9
#: Streams of weights: sampled pictures (or held-out losses), and reference pictures.
PICTURES = 0
REFERENCES = 1


@dataclass(frozen=True)
class Estimate:
    """A model's metric, and its values on the bootstrap resamples."""

    value: float
    n: int
    resampled: Float64  # [B]
    is_share: bool = False  # a mean of True and False
    is_mean: bool = False  # of numbers, one for each picture or held-out sample
    low: float = -np.inf  # the metric's range
    high: float = np.inf
    prompts: int = 0  # resampled with all their pictures; 0: each picture by itself
    counted: int = 0  # size of the set of a share whose members are not independent; 0: they are

    @property
    def units(self) -> int:
        """The number of independent values, if the interval is Student's; else 0."""
        return self.prompts or (self.n if self.is_mean else 0)

    def interval(self, level: float = LEVEL) -> Interval:
        """The confidence interval of the value; infinite for a mean of one value."""
        if self.is_share:
            return _wilson(self, level)
        low, high = _by_bootstrap(self.resampled, self.value, self.units, level)
        return max(low, self.low), min(high, self.high)

    def metric(self) -> Metric:
        """The metric in metrics.json."""
        return {
            "value": self.value,
            "n": self.n,
            "ci": _finite(self.interval()),
            "resamples": len(self.resampled),
            "interval": "wilson" if self.is_share else "t" if self.units else "bootstrap",
            **({"prompts": self.prompts} if self.prompts else {}),
            **({"counted": self.counted} if self.counted else {}),
        }


Estimates = Mapping[str, Estimate]


def _finite(interval: Interval) -> list[float] | None:
    return list(interval) if all(map(math.isfinite, interval)) else None


@dataclass(frozen=True)
class Resampling:
    """How often pictures are resampled, and by which prompts."""

    count: int
    seed: int
    prompts: Prompts | None = None  # of the pictures; None: each has its own prompt

    @property
    def of_references(self) -> Resampling:
        """The resampling of reference pictures, which have no prompts."""
        return replace(self, prompts=None)

    @property
    def clusters(self) -> int:
        """The number of prompts to resample; 0 if each picture is resampled by itself.

        This is also the case if every prompt has one picture. With one prompt alone, the spread
        between prompts is unknown: an interval is then about this prompt only.
        """
        if self.prompts is None:
            return 0
        distinct = len(set(self.prompts))
        return distinct if 1 < distinct < len(self.prompts) else 0

    def counts(self, n: int, stream: int = PICTURES) -> NDArray[np.int64]:
        """How often each of n pictures is in each resample [count, n].

        All pictures of a prompt are in it equally often. `clusters` says when `prompts` count.
        """
        drawn = self.clusters or n
        rng = np.random.default_rng((self.seed, stream, drawn))
        counts = rng.multinomial(drawn, np.full(drawn, 1 / drawn), size=self.count)
        if self.clusters:
            _, prompt_of = np.unique(np.array(self.prompts), return_inverse=True)
            counts = counts[:, prompt_of]
        return np.asarray(counts)

    @lru_cache(maxsize=8)  # noqa: B019  # until `memory_released`
    def weights(self, n: int, stream: int = PICTURES) -> Float64:
        """Bootstrap weights f64 [count, n] of n pictures, with sum 1. They are read-only."""
        counts = self.counts(n, stream)
        shares = counts / counts.sum(axis=1, keepdims=True)
        shares.setflags(write=False)
        return np.asarray(shares)


def mean(values: NDArray[Any], resampling: Resampling) -> Estimate:
    """The mean of values [N]. Raises ValueError if N is 0."""
    values = values.astype(np.float64)
    if len(values) == 0:
        raise ValueError("the mean needs at least one value")
    resampled = resampling.weights(len(values)) @ values
    average = float(values.mean())
    return Estimate(average, len(values), resampled, is_mean=True, prompts=resampling.clusters)


def share(passed: NDArray[np.bool_], resampling: Resampling) -> Estimate:
    """The share of True in bool [N]. Raises ValueError if N is 0."""
    if len(passed) == 0:
        raise ValueError("no pictures to judge")
    resampled = resampling.weights(len(passed)) @ passed
    average = float(np.mean(passed))
    drawn = resampling.clusters
    counted = len(passed) if drawn else 0
    return Estimate(average, len(passed), resampled, is_share=True, prompts=drawn, counted=counted)


def difference(
    tuned: Estimate,
    other: Estimate,
    *,
    factor: float = 1.0,
    offset: float = 0.0,
    level: float = LEVEL,
) -> Interval:
    """The paired confidence interval of tuned - (factor * other + offset).

    Two shares have Newcombe's interval (1998, method 10), since a bootstrap has no width at 0 and
    1. All others have the interval of the resampled differences.

    Raises:
        ValueError: the estimates are not paired.
    """
    pictures = [(e.n, e.prompts, len(e.resampled)) for e in (tuned, other)]
    if pictures[0] != pictures[1]:
        raise ValueError("the two metrics are of different pictures or resamples")
    value = tuned.value - factor * other.value - offset
    if tuned.is_share and other.is_share:
        return _newcombe(tuned, other, factor, value, level)
    resampled = tuned.resampled - factor * other.resampled - offset
    return _by_bootstrap(resampled, value, tuned.units, level)


def squared_error(tuned: Estimate, other: Estimate, factor: float) -> float:
    """The squared standard error of tuned - factor * other, by their paired resamples."""
    return _variance(tuned.resampled - factor * other.resampled, tuned.units)


def differences(tuned: Estimates, other: Estimates) -> dict[str, Metric]:
    """Metric name -> {"value", "ci"} of tuned - other, for each metric that both have."""
    return {
        name: {
            "value": estimate.value - other[name].value,
            "ci": _finite(difference(estimate, other[name])),
        }
        for name, estimate in tuned.items()
        if name in other and other[name].n == estimate.n
    }


def to_npz(models: Mapping[str, Estimates]) -> bytes:
    """The resampled values f32 of every model and metric, as a deterministic .npz file."""
    arrays = {
        f"{model}/{name}": estimate.resampled.astype(np.float32)
        for model, estimates in models.items()
        for name, estimate in estimates.items()
    }
    np.savez(buffer := BytesIO(), allow_pickle=False, **arrays)
    return buffer.getvalue()


def from_npz(
    data: bytes, metrics: Mapping[str, Mapping[str, Metric]], model: str
) -> dict[str, Estimate]:
    """A model's estimates, without ranges, from metrics.json and the file of `to_npz`.

    Raises:
        KeyError: the file lacks a metric.
    """
    with np.load(BytesIO(data), allow_pickle=False) as arrays:
        return {
            name: Estimate(
                models[model]["value"],
                models[model]["n"],
                arrays[f"{model}/{name}"].astype(np.float64),
                models[model]["interval"] == "wilson",
                models[model]["interval"] == "t",
                prompts=models[model].get("prompts", 0),
                counted=models[model].get("counted", 0),
            )
            for name, models in metrics.items()
            if model in models
        }


def _by_bootstrap(resampled: Float64, value: float, units: int, level: float) -> Interval:
    """Percentile interval, without the bootstrap estimate of bias (Efron & Tibshirani, ch. 10).

    Resamples with replacement have less spread than the sample, which increases a distance.
    Without the correction the whole interval may lie above the value. Percentiles of few resamples
    are too narrow; the interval is then value +- z standard errors (ch. 12). So are percentiles of
    few values or prompts; the interval is then value +- t standard errors.

    Args:
        units: the number of independent values or prompts; 0 for percentiles.
    """
    if units == 1:
        return -math.inf, math.inf
    tail = (1.0 - level) / 2.0
    if units or len(resampled) * tail < LEAST_BEYOND - 1e-9:
        half = quantile(level, units) * math.sqrt(_variance(resampled, units))
        return value - half, value + half
    centred = resampled - (resampled.mean() - value)
    low, high = np.percentile(centred, [100.0 * tail, 100.0 * (1.0 - tail)])
    return float(low), float(high)


def quantile(level: float, units: int) -> float:
    """Half the width of an interval in standard errors.

    Args:
        units: the number of values or prompts that Student's t is of; 0: the normal distribution.
    """
    if not units:
        return NormalDist().inv_cdf((1.0 + level) / 2.0)
    from scipy.special import stdtrit  # half a second to import

    return float(stdtrit(units - 1, (1.0 + level) / 2.0))


def _variance(resampled: Float64, units: int) -> float:
    """The squared standard error. Resamples of G units have (G - 1) / G of it."""
    variance = float(resampled.var(ddof=1)) if len(resampled) > 1 else 0.0
    return variance * units / (units - 1) if units else variance


def _independent(estimate: Estimate) -> float:
    """The number of independent pictures with the variance of a share's resamples.

    At 0 and 1 the resamples may have no variance; the pictures then count as independent.
    """
    if not estimate.counted:
        return estimate.n
    p = estimate.value
    variance = _variance(estimate.resampled, estimate.prompts)
    known = ROUNDING < p < 1.0 - ROUNDING and variance > ROUNDING**2
    return min(estimate.counted, p * (1.0 - p) / variance) if known else estimate.counted


def _wilson(estimate: Estimate, level: float) -> Interval:
    """Wilson's score interval (1927), valid at 0 and 1 too.

    Korn & Graubard 1998: a share's variance by the resamples, and Student's t, reduce the number
    of pictures.
    """
    z = quantile(level, 0)
    n = _independent(estimate)
    if estimate.counted:
        n *= (z / quantile(level, estimate.prompts)) ** 2
    p = estimate.value
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def _newcombe(a: Estimate, b: Estimate, factor: float, value: float, level: float) -> Interval:
    """The interval of a - factor * b from Wilson's limits and the correlation of the resamples.

    Newcombe subtracts n / 2 from n² times a positive covariance of two pictures, or all of it if it
    is less: two models that agree on all of few pictures may differ on others.
    """
    low_a, high_a = _wilson(a, level)
    low_b, high_b = _wilson(b, level)
    spread = a.resampled.std() * b.resampled.std()
    both = ((a.resampled - a.resampled.mean()) * (b.resampled - b.resampled.mean())).mean()
    if both > 0:  # of means of n pictures, which is 1 / n of that of pictures
        both = max(both - 0.5 / min(_independent(a), _independent(b)) ** 2, 0.0)
    correlation = both / spread if spread > ROUNDING**2 else 0.0

    def width(x: float, y: float) -> float:
        return float(np.sqrt(max(x**2 - 2 * correlation * x * y + y**2, 0.0)))

    below = width(a.value - low_a, factor * (high_b - b.value))
    above = width(high_a - a.value, factor * (b.value - low_b))
    return value - below, value + above


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
    x = normalise(images)
    y = normalise(reference)

    def distance(wx: Float64, wy: Float64) -> Float64:
        """Distances [B] for weights [B, N] and [B, M], whose rows sum to 1."""
        xx = _mean(_gaussian, x, x, wx, wx)
        yy = _mean(_gaussian, y, y, wy, wy)
        return CMMD_SCALE * (xx + yy - 2.0 * _mean(_gaussian, x, y, wx, wy))

    estimate = _estimate(distance, len(x), len(y), resampling)
    return replace(estimate, value=max(estimate.value, 0.0), low=0.0)


def kid(images: NDArray[Any], reference: NDArray[Any], resampling: Resampling) -> Estimate:
    """Kernel inception distance: the unbiased squared MMD with the kernel (x.y / D + 1)³.

    Bińkowski et al. 2018 (arXiv 1801.01401), over all pictures instead of random subsets. It may
    be below 0.

    Raises:
        ValueError: N or M is below 2.
    """
    x = images.astype(np.float64)
    y = reference.astype(np.float64)
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
    x = images.astype(np.float64)
    y = reference.astype(np.float64)
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
    estimate = _estimate(
        lambda wx, wy: _share_inside(inside, wx, wy), len(images), len(reference), resampling
    )
    return replace(estimate, is_share=True, counted=len(images))


def recall(images: NDArray[Any], reference: NDArray[Any], resampling: Resampling) -> Estimate:
    """Share of the references within the pictures' manifold: are they as diverse. See precision."""
    inside = _within(reference, images)
    estimate = _estimate(
        lambda wx, wy: _share_inside(inside, wy, wx), len(images), len(reference), resampling
    )
    return replace(estimate, is_share=True, counted=len(reference))


def _share_inside(inside: NDArray[np.bool_], points: Float64, manifold: Float64) -> Float64:
    """The weight [B] of points in a resampled manifold.

    Args:
        inside: bool [N, M], whether each point lies in the ball of each picture of the manifold.
        points: their weights [B, N].
        manifold: the weights [B, M] of its pictures.
    """
    return np.asarray(((manifold > 0) @ inside.T.astype(np.float64) > 0.5) * points).sum(axis=1)


#: A metric of image features [N, D] and reference features [M, D].
Distance = Callable[[NDArray[Any], NDArray[Any], Resampling], Estimate]
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
    value: Callable[[Float64, Float64], Float64], n: int, m: int, resampling: Resampling
) -> Estimate:
    """The estimate of a function of weights [B, N] and [B, M]."""
    all_equal = value(np.full((1, n), 1 / n), np.full((1, m), 1 / m))
    wx = resampling.weights(n)
    wy = resampling.of_references.weights(m, REFERENCES)
    return Estimate(float(all_equal[0]), n, value(wx, wy), prompts=resampling.clusters)


def _within(points: NDArray[Any], manifold: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each of points [N, D] lies in the ball of each of manifold [M, D]: bool [N, M]."""
    x = points.astype(np.float64)
    y = manifold.astype(np.float64)
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
    sums = np.zeros(len(wx))
    for rows in _blocks(len(x)):
        sums += ((wx[:, rows] @ kernel(x[rows], y)) * wy).sum(axis=1)
    return sums


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
