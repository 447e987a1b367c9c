"""The learning rate of a step, computed on the host: a new value never recompiles a step."""

from __future__ import annotations

import math

from configs.training import Train


def learning_rate(step: int, settings: Train) -> float:
    """Linear warm-up to the peak, then constant, linear or cosine (arXiv 1608.03983) descent.

    Step `warmup_steps - 1` is the first at the peak; the descent would reach
    `lr_final * learning_rate` at step `steps`.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.lr_schedule == "constant":
        return settings.learning_rate
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    left = 1 - done if settings.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return settings.learning_rate * (settings.lr_final + (1 - settings.lr_final) * left)
