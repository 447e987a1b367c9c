"""The learning rate of a step, computed on the host: a new value never recompiles a step."""

from __future__ import annotations

import math

from configs.training import Train


def learning_rate(step: int, settings: Train) -> float:
    """Linear warm-up to the peak, then constant or falling.

    Step `lr_warmup_steps - 1` is the first at the peak; the fall would reach
    `lr_min_ratio * learning_rate` at step `steps`.
    """
    if step < settings.lr_warmup_steps:
        return settings.learning_rate * (step + 1) / settings.lr_warmup_steps
    done = (step - settings.lr_warmup_steps) / max(1, settings.steps - settings.lr_warmup_steps)
    left = _left(min(done, 1.0), settings)
    return settings.learning_rate * (settings.lr_min_ratio + (1 - settings.lr_min_ratio) * left)


def _left(done: float, settings: Train) -> float:
    """Share of the fall still to come, from 1 to 0, when `done` of the steps after warm-up are.

    Cosine and its restarts, which go back to the peak at once: SGDR, arXiv 1608.03983.
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
