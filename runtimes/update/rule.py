"""Scalars of the optimizer step: EMA decay, Adam's bias corrections, text encoder learning rate."""

from __future__ import annotations

import math

from configs.training import Train


def ema_decay_at(step: int, ema_decay: float) -> float:
    """EMA decay at a step, with the warmup of tf.train.ExponentialMovingAverage.

    Without warmup the initial weights would dominate the average for long.

    Args:
        step: optimizer step, from 0.
        ema_decay: the decay after warmup.
    """
    return min(ema_decay, (1 + step) / (10 + step))


def bias_corrections(betas: tuple[float, float], count: int) -> tuple[float, float]:
    """1 - beta1^t and sqrt(1 - beta2^t), as torch.optim.AdamW applies them (arXiv 1412.6980).

    Args:
        betas: of Adam.
        count: t, the number of updates so far, including the current one.
    """
    beta1, beta2 = betas
    return 1 - beta1**count, math.sqrt(1 - beta2**count)


def text_encoder_factor(settings: Train) -> float:
    """The text encoders' learning rate, divided by the denoiser's."""
    return (settings.text_encoder_lr or settings.learning_rate) / settings.learning_rate
