"""Scalars of the optimizer step: Adam's bias corrections, text encoder learning rate."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from configs.train import Train
from runtimes.optimizer_step.ema_decay import ema_decay_at


def bias_corrections(betas: tuple[float, float], count: int) -> tuple[float, float]:
    """1 - beta1^t and sqrt(1 - beta2^t), as torch.optim.AdamW applies them (arXiv 1412.6980).

    Args:
        betas: of Adam.
        count: t, the number of updates so far, including the current one.
    """
    beta1, beta2 = betas
    return 1 - beta1**count, math.sqrt(1 - beta2**count)


def step_scalars(step: int, learning_rate: float, settings: Train) -> NDArray[np.float32]:
    """The scalars [4] f32 of step `step` (from 0), inputs of a compiled update.

    They are learning rate, bias-corrected step size, sqrt(1 - beta2^t) and EMA decay.
    """
    first, second_root = bias_corrections(settings.adam_betas, step + 1)
    decay = ema_decay_at(step, settings.ema_decay or 0.0)
    return np.array((learning_rate, learning_rate / first, second_root, decay), np.float32)


def text_encoder_factor(settings: Train) -> float:
    """The text encoders' learning rate, divided by the denoiser's."""
    return (settings.text_encoder_lr or settings.learning_rate) / settings.learning_rate
