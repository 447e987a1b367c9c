"""Bootstrap intervals: of one model's metric, and of the difference between two models.

Resample b has the same pictures for every model and metric with n pictures, because its weights
depend on (seed, n) alone. The difference of two resampled metrics is therefore a paired bootstrap
(Efron & Tibshirani 1993, ch. 8 and 13).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: A metric in metrics.json: {"value", "n", "ci": [low, high], "resamples", "interval"}.
Metric = dict[str, Any]
Float64 = NDArray[np.float64]
Interval = tuple[float, float]
LEVEL = 0.95
#: Resamples beyond each end of an interval by percentiles; with fewer, their spread decides.
LEAST_BEYOND = 5
#: Streams of weights: sampled pictures (or held-out losses), and reference pictures.
PICTURES, REFERENCES = 0, 1


@dataclass(frozen=True)
class Estimate:
    """A model's metric, and its values on the bootstrap resamples."""

    value: float
    n: int
    resampled: Float64  # [B]
    is_share: bool = False  # a mean of True and False
    low: float = -np.inf  # the metric's range
    high: float = np.inf

    def interval(self, level: float = LEVEL) -> Interval:
        """The confidence interval of the value: Wilson's for a share, else by bootstrap."""
        if self.is_share:
            return _wilson(self, level)
        low, high = _by_bootstrap(self.resampled, self.value, level)
        return max(low, self.low), min(high, self.high)

    def metric(self) -> Metric:
        """The metric in metrics.json."""
        return {
            "value": self.value,
            "n": self.n,
            "ci": list(self.interval()),
            "resamples": len(self.resampled),
            "interval": "wilson" if self.is_share else "bootstrap",
        }


Estimates = Mapping[str, Estimate]


def weights(seed: int, resamples: int, n: int, stream: int = PICTURES) -> Float64:
    """Bootstrap weights f64 [resamples, n]: multinomial counts divided by n. Do not change them."""
    return _weights(seed, resamples, n, stream)


@lru_cache(maxsize=8)
def _weights(seed: int, resamples: int, n: int, stream: int) -> Float64:
    rng = np.random.default_rng((seed, stream, n))
    found = rng.multinomial(n, np.full(n, 1 / n), size=resamples) / n
    found.setflags(write=False)
    return np.asarray(found)


def mean(values: NDArray[Any], resamples: int, seed: int) -> Estimate:
    """The mean of values [N]. Raises ValueError if N is 0."""
    values = values.astype(np.float64)
    if len(values) == 0:
        raise ValueError("the mean needs at least one value")
    resampled = weights(seed, resamples, len(values)) @ values
    return Estimate(float(values.mean()), len(values), resampled)


def share(passed: NDArray[np.bool_], resamples: int, seed: int) -> Estimate:
    """The share of True in bool [N]. Raises ValueError if N is 0."""
    if len(passed) == 0:
        raise ValueError("no pictures to judge")
    resampled = weights(seed, resamples, len(passed)) @ passed
    return Estimate(float(np.mean(passed)), len(passed), resampled, is_share=True)


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
    if (tuned.n, len(tuned.resampled)) != (other.n, len(other.resampled)):
        raise ValueError("the two metrics are of different pictures or resamples")
    value = tuned.value - factor * other.value - offset
    if tuned.is_share and other.is_share:
        return _newcombe(tuned, other, factor, value, level)
    resampled = tuned.resampled - factor * other.resampled - offset
    return _by_bootstrap(resampled, value, level)


def differences(tuned: Estimates, other: Estimates) -> dict[str, Metric]:
    """Metric name -> {"value", "ci"} of tuned - other, for each metric that both have."""
    return {
        name: {
            "value": estimate.value - other[name].value,
            "ci": list(difference(estimate, other[name])),
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
    data: bytes,
    metrics: Mapping[str, Mapping[str, Metric]],
    model: str,
    ranges: Mapping[str, Interval],
) -> Estimates:
    """A model's estimates from metrics.json and the file of `to_npz`.

    Args:
        ranges: metric name -> its range; of a metric without one all numbers are possible.

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
                *ranges.get(name, (-np.inf, np.inf)),
            )
            for name, models in metrics.items()
            if model in models
        }


def _by_bootstrap(resampled: Float64, value: float, level: float) -> Interval:
    """Percentile interval, without the bootstrap estimate of bias (Efron & Tibshirani, ch. 10).

    Resamples with replacement have less spread than the sample, which increases a distance.
    Without the correction the whole interval may lie above the value. Percentiles of few resamples
    are too narrow; the interval is then value +- z standard errors (ch. 12).
    """
    tail = (1.0 - level) / 2.0
    if len(resampled) * tail < LEAST_BEYOND - 1e-9:
        half = NormalDist().inv_cdf(1.0 - tail) * float(resampled.std(ddof=1))
        return value - half, value + half
    centred = resampled - (resampled.mean() - value)
    low, high = np.percentile(centred, [100.0 * tail, 100.0 * (1.0 - tail)])
    return float(low), float(high)


def _wilson(estimate: Estimate, level: float) -> Interval:
    """Wilson's score interval (1927), valid at 0 and 1 too."""
    z, n, p = NormalDist().inv_cdf((1.0 + level) / 2.0), estimate.n, estimate.value
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def _newcombe(a: Estimate, b: Estimate, factor: float, value: float, level: float) -> Interval:
    """The interval of a - factor * b from Wilson's limits and the correlation of the resamples."""
    (low_a, high_a), (low_b, high_b) = _wilson(a, level), _wilson(b, level)
    spread = a.resampled.std() * b.resampled.std()
    both = ((a.resampled - a.resampled.mean()) * (b.resampled - b.resampled.mean())).mean()
    correlation = both / spread if spread > 0 else 0.0

    def width(x: float, y: float) -> float:
        return float(np.sqrt(max(x**2 - 2 * correlation * x * y + y**2, 0.0)))

    below = width(a.value - low_a, factor * (high_b - b.value))
    above = width(high_a - a.value, factor * (b.value - low_b))
    return value - below, value + above
