"""The learning rate of each step, and its share for each group of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable

from configs.settings.train import Train


def learning_rate(step: int, settings: Train) -> float:
    """The learning rate of a step (from 0): linear warm-up to the peak, then the chosen decay.

    Step `lr_warmup_steps - 1` is the first at the peak `learning_rate`. The decay would reach
    `lr_min_ratio * learning_rate` at step `steps`, the step after the last.
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
        case "cosine_with_restarts" if done < 1:
            done = done * settings.lr_num_cycles % 1
    return 0.5 * (1 + math.cos(math.pi * done))


def learning_rate_groups(names: Iterable[str], settings: Train) -> list[tuple[list[str], float]]:
    """Groups of trained parameters, each with its learning rate divided by the denoiser's.

    Args:
        names: names of the parameters, State's keys.

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
