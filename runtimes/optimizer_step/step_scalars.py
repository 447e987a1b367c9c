"""Scalars of the optimizer step: Adam's bias corrections, EMA decay, text encoders' rates."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from configs.settings.train import Train


def bias_corrections(betas: tuple[float, float], count: int) -> tuple[float, float]:
    """1 - beta1^t and sqrt(1 - beta2^t), as torch.optim.AdamW applies them (arXiv 1412.6980).

    Args:
        betas: of Adam.
        count: t, the number of updates so far, including the current one.
    """
    beta1, beta2 = betas
    return 1 - beta1**count, math.sqrt(1 - beta2**count)


def ema_decay_at(step: int, settings: Train) -> float:
    """EMA decay at a step, with the warmup of tf.train.ExponentialMovingAverage.

    Without warmup the initial weights would dominate the average for long.

    Args:
        step: optimizer step, from 0.
        settings: `ema_decay` per step after warmup, and `ema_every_n_steps`, the steps n between
            updates. An update decays by the n-th power, the run's last one by as many steps as it
            follows the one before. At other steps the decay is 1, which changes no average.
    """
    every = settings.ema_every_n_steps
    passed = (step + 1) % every or every  # steps since the last update
    if passed < every and step + 1 < settings.steps:
        return 1.0
    decay: float = min(settings.ema_decay or 0.0, (1 + step) / (10 + step)) ** passed
    return decay


def step_scalars(step: int, learning_rate: float, settings: Train) -> NDArray[np.float32]:
    """The scalars [4] f32 of step `step` (from 0), inputs of a compiled update.

    They are learning rate, bias-corrected step size, sqrt(1 - beta2^t), and the weights' share of
    the EMA, 1 - decay: of a decay near 1, float32 keeps few digits of this difference.
    """
    first, second_root = bias_corrections(settings.adam_betas, step + 1)
    ema_share = 1 - ema_decay_at(step, settings)
    return np.array((learning_rate, learning_rate / first, second_root, ema_share), np.float32)


def learning_rate_groups(names: Iterable[str], settings: Train) -> list[tuple[list[str], float]]:
    """Groups of trained parameters, each with its learning rate divided by the denoiser's.

    Args:
        names: of the parameters, State's keys.

    Returns:
        The denoiser's group, then that of the text encoders, each in the order of `names`; an
        empty group is absent.
    """
    text_rate = settings.text_encoder_lr or settings.learning_rate
    groups: dict[bool, list[str]] = {False: [], True: []}
    for name in names:
        groups[name.startswith("text_encoder")].append(name)
    factors = {False: 1.0, True: text_rate / settings.learning_rate}
    return [(group, factors[is_text]) for is_text, group in groups.items() if group]


def learning_rate_factors(names: Iterable[str], settings: Train) -> dict[str, float]:
    """Name -> learning rate divided by the denoiser's; the arguments of learning_rate_groups."""
    return {n: factor for group, factor in learning_rate_groups(names, settings) for n in group}
