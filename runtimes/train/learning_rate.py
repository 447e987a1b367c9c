"""The learning rate schedule, computed on the host: the rate is data, not part of a program."""

from __future__ import annotations

import math

from configs.settings.train import Train


def learning_rate(step: int, settings: Train) -> float:
    """The learning rate of a step (from 0): linear warm-up to the peak, then the chosen decay.

    Step `lr_warmup_steps - 1` is the first at the peak `learning_rate`. The decay would reach
    `lr_min_ratio * learning_rate` at step `steps`, one after the last.
    """
    if step < settings.lr_warmup_steps:
        return settings.learning_rate * (step + 1) / settings.lr_warmup_steps
    done = (step - settings.lr_warmup_steps) / max(1, settings.steps - settings.lr_warmup_steps)
    factor = _decay(min(done, 1.0), settings)
    return settings.learning_rate * (settings.lr_min_ratio + (1 - settings.lr_min_ratio) * factor)


def _decay(done: float, settings: Train) -> float:
    """The decay factor in [0, 1] after the fraction `done` of the steps since warm-up.

    Cosine with warm restarts: SGDR, arXiv 1608.03983. The other shapes are diffusers'.
    """
    match settings.lr_scheduler:
        case "constant":
            return 1.0
        case "linear":
            return 1 - done
        case "polynomial":
            return float((1 - done) ** settings.lr_power)
        case "cosine":
            return _cosine(done)
        case "cosine_with_restarts":
            return _cosine(done * settings.lr_num_cycles % 1 if done < 1 else 1.0)


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))
