"""Random draws per sample: noise, offset noise, input perturbation, caption dropout and choices.

Each draw is keyed on (seed, stream, sample counter), see counter_based_random.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtimes.objective.counter_based_random import Stream, generators
from runtimes.objective.timestep_probabilities import Probabilities, level_at

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Choices:
    """The random choices for one sample, besides its noise."""

    level: int  # noise level, from 0 (least noise)
    caption: float  # uniform in [0, 1), selects one of the captions
    dropped: bool  # whether the empty caption replaces the caption
    flip: float  # uniform in [0, 1), below 0.5: use the mirrored image, if stored
    mask: float  # uniform in [0, 1), selects one of the masks


def draw_choices(
    seed: int,
    counters: Sequence[int],
    levels: int,
    cumulative: Probabilities | None,
    caption_dropout_rate: float,
) -> list[Choices]:
    """The random choices for each sample.

    Args:
        counters: B sample counters.
        levels: number of noise levels.
        cumulative: distribution function of levels [levels]; None draws them uniformly.
        caption_dropout_rate: probability of training a sample without its caption.
    """
    found = []
    for rng in generators(seed, Stream.CHOICES, counters):
        level, caption, dropout, flip, mask = rng.random(5).tolist()
        chosen = int(level * levels) if cumulative is None else level_at(level, cumulative)
        found.append(Choices(chosen, caption, dropout < caption_dropout_rate, flip, mask))
    return found


def draw_noise(seed: int, counters: Sequence[int], shape: tuple[int, ...], offset: float) -> Array:
    """eps [B, C, h, w] f32, with a random shift per channel for a noise offset.

    N. Guttenberg, "Diffusion with offset noise", 2023.

    Args:
        counters: B sample counters.
        shape: (C, h, w).
        offset: scale of the shift; 0 draws none.
    """
    noise = draw_normal(seed, Stream.NOISE, counters, shape)
    if offset:
        shift = draw_normal(seed, Stream.NOISE_OFFSET, counters, (shape[0], 1, 1))
        noise = noise + np.float32(offset) * shift
    return noise


def perturb(seed: int, counters: Sequence[int], noise: Array, scale: float) -> Array:
    """The perturbed noise of the model's input; the target has `noise` (arXiv 2301.11706)."""
    if not scale:
        return noise
    more = draw_normal(seed, Stream.INPUT_PERTURBATION, counters, noise.shape[1:])
    return noise + np.float32(scale) * more


def draw_normal(
    seed: int, stream: Stream, counters: Sequence[int], shape: tuple[int, ...]
) -> Array:
    """Standard normal numbers [B, *shape] f32."""
    drawn = np.empty((len(counters), *shape), np.float32)
    for row, rng in zip(drawn, generators(seed, stream, counters), strict=True):
        rng.standard_normal(out=row, dtype=np.float32)
    return drawn
