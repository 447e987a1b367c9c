"""Timestep sampling: the probability of each noise level during training."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from configs.settings.train_parts import TimestepSampling
from runtimes.contract import WrongInput

Probabilities = NDArray[np.float64]


def level_bounds(settings: TimestepSampling, count: int) -> Probabilities | None:
    """The cumulative distribution of levels [count] f64; None for a uniform distribution.

    Raises:
        WrongInput: the bias range contains no level.
    """
    if settings.distribution == "uniform" and settings.bias_strategy == "none":
        return None
    bounds = np.cumsum(level_probabilities(settings, count))
    return np.append(bounds[:-1], 1.0)


def level_probabilities(settings: TimestepSampling, count: int) -> Probabilities:
    """Probability of each level [count] f64, in order of increasing noise.

    Level k covers u in [k / count, (k + 1) / count).

    Raises:
        WrongInput: the bias range contains no level.
    """
    probabilities = _bias_weights(settings, count)
    if settings.distribution == "logit_normal":
        mean, std = -settings.logit_mean, settings.logit_std
        probabilities = probabilities * logit_normal_probabilities(mean, std, count)
    return probabilities / probabilities.sum()


def logit_normal_probabilities(mean: float, std: float, count: int) -> Probabilities:
    """Probability mass [count] of u = 1 / (1 + exp(-n)), n ~ N(mean, std^2), in each level.

    SD3, arXiv 2403.03206, section 3.1. A mean above 0 favours noisier levels. The setting
    `logit_mean` has the opposite sign, because u = 0 is pure noise in diffusers.
    """
    normal = NormalDist(mean, std)
    inner = [normal.cdf(math.log(k / (count - k))) for k in range(1, count)]
    return np.diff([0.0, *inner, 1.0])


def level_at(u: float, bounds: Probabilities) -> int:
    """The level for a uniform u in [0, 1): inverse transform sampling with `level_bounds`."""
    return int(np.searchsorted(bounds, u, side="right"))


def _bias_weights(settings: TimestepSampling, count: int) -> Probabilities:
    """Unnormalised weights [count]: `bias_multiplier` inside the bias range, 1 elsewhere."""
    weights = np.ones(count)
    if settings.bias_strategy == "none":
        return weights
    begin, end = settings.bias_begin, settings.bias_end
    if settings.bias_strategy != "range":
        some = int(settings.bias_portion * count)
        begin, end = (0, some) if settings.bias_strategy == "earlier" else (count - some, count)
    if not begin < end <= count:
        what = "bias_begin and bias_end" if settings.bias_strategy == "range" else "bias_portion"
        raise WrongInput(
            f"train.timesteps.{what}: {begin} to {end} is no range of the schedule's {count} "
            "timesteps"
        )
    weights[begin:end] = settings.bias_multiplier
    return weights
