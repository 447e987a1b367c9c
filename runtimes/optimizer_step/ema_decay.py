"""The decay of the weights' exponential moving average (EMA)."""

from __future__ import annotations

from configs.settings.train import Train


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
