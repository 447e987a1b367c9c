"""The decay of the weights' exponential moving average (EMA)."""

from __future__ import annotations


def ema_decay_at(step: int, ema_decay: float, every: int = 1) -> float:
    """EMA decay at a step, with the warmup of tf.train.ExponentialMovingAverage.

    Without warmup the initial weights would dominate the average for long.

    Args:
        step: optimizer step, from 0.
        ema_decay: the decay per step after warmup.
        every: steps between updates of the average. An update decays it as much as `every` updates
            would; at other steps the decay is 1, which leaves the average as it is.
    """
    if (step + 1) % every:
        return 1.0
    decay: float = min(ema_decay, (1 + step) / (10 + step)) ** every
    return decay
