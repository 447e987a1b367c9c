"""Timestep sampling: the probability of each noise level during training."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from configs.training import TimestepSampling
from runtimes.contract import WrongInput

Shares = NDArray[np.float64]


def level_bounds(settings: TimestepSampling, count: int) -> Shares | None:
    """The cumulative distribution of levels [count] f64; None for a uniform distribution.

    Raises:
        WrongInput: the bias range contains no level.
    """
    shares = level_shares(settings, count)
    if settings.distribution == "uniform" and settings.bias_strategy == "none":
        return None
    bounds = np.cumsum(shares)
    return np.append(bounds[:-1], 1.0)


def level_shares(settings: TimestepSampling, count: int) -> Shares:
    """Probability of each level [count] f64, in order of increasing noise.

    Level k covers u in [k / count, (k + 1) / count).

    Raises:
        WrongInput: the bias range contains no level.
    """
    shares = _biased(settings, count)
    if settings.distribution == "logit_normal":
        shares = shares * logit_normal_shares(-settings.logit_mean, settings.logit_std, count)
    return shares / shares.sum()


def logit_normal_shares(mean: float, std: float, count: int) -> Shares:
    """Probability mass [count] of u = 1 / (1 + exp(-n)), n ~ N(mean, std^2), in each level.

    SD3, arXiv 2403.03206, section 3.1. A mean above 0 favours noisier levels. The setting
    `logit_mean` has the opposite sign, because u = 0 is pure noise in diffusers.
    """
    normal = NormalDist(mean, std)
    inner = [normal.cdf(math.log(k / (count - k))) for k in range(1, count)]
    return np.diff([0.0, *inner, 1.0])


def level_at(u: float, bounds: Shares) -> int:
    """The level for a uniform u in [0, 1): inverse transform sampling with `level_bounds`."""
    return int(np.searchsorted(bounds, u, side="right"))


def _biased(settings: TimestepSampling, count: int) -> Shares:
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
