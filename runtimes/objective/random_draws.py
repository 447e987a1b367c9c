"""Random draws of training: counter-based, so each step is drawn without those before it.

NumPy's Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The
key is (seed, stream). Words 1 to 3 of the counter hold our counters; NumPy advances word 0.

The settings give the probability of each noise level. Draws of a sample (its noise and choices) are
keyed on (seed, stream, sample counter).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, unique
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.errors import Refused
from configs.settings.train_parts import TimestepSampling


@unique
class Stream(IntEnum):
    """Independent random streams, one per purpose; parentheses name the counters."""

    POSTERIOR = 1  # (sample) the VAE posterior
    NOISE = 2  # (sample) the diffusion noise
    NOISE_OFFSET = 3  # (sample) its per-channel shift
    CHOICES = 4  # (sample) timestep, caption, dropout, flip, mask: uniforms, in this order
    BATCHES = 5  # (epoch) the order of buckets
    SHARDS = 6  # (epoch) the order of shards, the same for all buckets
    WINDOW = 7  # (epoch, bucket, window) the order of samples
    PICTURE = 8  # (image) the initial noise of sampling
    INPUT_PERTURBATION = 9  # (sample) the perturbation of the input noise
    REFERENCES = 10  # (batch) whether its references are dropped
    ADAPTERS = 20  # (digest of an adapter's name) its initial weights
    DROPOUT = 21  # (step, first sample of the micro-batch, rank) the dropout seed
    SCORE = 22  # () the initial weights of the aesthetic-score embedding


def generator(seed: int, stream: Stream, *counter: int) -> np.random.Generator:
    """A generator for one stream at up to three counters, each below 2**64."""
    words = np.zeros(4, np.uint64)
    words[1 : 1 + len(counter)] = counter
    key = np.array([seed, stream], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=words))


def generators(seed: int, stream: Stream, counters: Iterable[int]) -> Iterator[np.random.Generator]:
    """Yield `generator(seed, stream, counter)` for each counter, about ten times faster.

    All are the same object with a new state: a generator is valid until the next is yielded.
    """
    rng = generator(seed, stream)
    state: Any = rng.bit_generator.state
    for counter in counters:
        state["state"]["counter"][1] = counter
        rng.bit_generator.state = state
        yield rng


Probabilities = NDArray[np.float64]


def level_bounds(settings: TimestepSampling, count: int) -> Probabilities | None:
    """The cumulative distribution of levels [count] f64; None for a uniform distribution.

    Raises:
        Refused: the bias range contains no level.
    """
    if settings.distribution == "uniform" and settings.bias_strategy == "none":
        return None
    bounds = np.cumsum(level_probabilities(settings, count))
    return np.append(bounds[:-1], 1.0)


def level_probabilities(settings: TimestepSampling, count: int) -> Probabilities:
    """Probability of each level [count] f64, in order of increasing noise.

    Level k covers u in [k / count, (k + 1) / count).

    Raises:
        Refused: the bias range contains no level.
    """
    probabilities = _bias_weights(settings, count)
    if settings.distribution == "logit_normal":
        mean = -settings.logit_mean
        std = settings.logit_std
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
    begin = settings.bias_begin
    end = settings.bias_end
    if settings.bias_strategy != "range":
        some = int(settings.bias_portion * count)
        begin, end = (0, some) if settings.bias_strategy == "earlier" else (count - some, count)
    if not begin < end <= count:
        what = "bias_begin and bias_end" if settings.bias_strategy == "range" else "bias_portion"
        raise Refused(
            f"train.timesteps.{what}: {begin} to {end} is no range of the schedule's {count} "
            "timesteps"
        )
    weights[begin:end] = settings.bias_multiplier
    return weights


Array = NDArray[np.float32]


@dataclass(frozen=True)
class Choices:
    """The random choices for one sample, besides its noise."""

    level: int  # noise level, from 0 (least noise)
    caption: float  # uniform in [0, 1), selects a caption
    dropped: bool  # whether the empty caption replaces the caption
    flip: float  # uniform in [0, 1), below 0.5: use the mirrored image, if stored
    mask: float  # uniform in [0, 1), selects a mask


def draw_normal(
    seed: int, stream: Stream, counters: Sequence[int], shape: tuple[int, ...]
) -> Array:
    """Standard normal numbers [B, *shape] f32."""
    drawn = np.empty((len(counters), *shape), np.float32)
    for row, rng in zip(drawn, generators(seed, stream, counters), strict=True):
        rng.standard_normal(out=row, dtype=np.float32)
    return drawn
