"""The decay of the weights' exponential moving average (EMA)."""

from __future__ import annotations


def ema_decay_at(step: int, ema_decay: float) -> float:
    """EMA decay at a step, with the warmup of tf.train.ExponentialMovingAverage.

    Without warmup the initial weights would dominate the average for long.

    Args:
        step: optimizer step, from 0.
        ema_decay: the decay after warmup.
    """
    return min(ema_decay, (1 + step) / (10 + step))
