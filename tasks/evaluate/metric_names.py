"""Names of the metrics that an evaluation computes, and the pictures that each one is of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from configs.explain_errors import hint_of
from configs.settings.recipe import Recipe
from configs.settings.train_parts import HOLDOUT_LOSS
from tasks.evaluate import holdout_loss, memorization
from tasks.evaluate.bootstrap import Estimate, Estimates, Interval
from tasks.evaluate.distribution_distances import DISTANCES, INCEPTION_DISTANCES
from tasks.evaluate.judges import judge_names
from tasks.evaluate.prompts import PromptSets, prompt_sets

CLIP_SCORE, CMMD = "clip_score", "cmmd"
#: Distances need this many pictures of a model, and as many held-out ones.
LEAST_COMPARED = 2
#: Metrics, and the bands and prompt sets of metrics, whose lower value is better.
LOWER_IS_BETTER = (
    *(HOLDOUT_LOSS, CMMD, "fd", "kid", *INCEPTION_DISTANCES),
    *(memorization.FEATURES, memorization.PIXELS),
)
#: Metric, with its bands and prompt sets -> its range, to which intervals are cut.
RANGES: dict[str, Interval] = {
    CLIP_SCORE: (0.0, 100.0),
    **dict.fromkeys((HOLDOUT_LOSS, CMMD, "fd", "fd_inception"), (0.0, math.inf)),
}


def with_ranges(estimates: Estimates) -> dict[str, Estimate]:
    """The estimates of metrics by name, with the metrics' ranges."""
    found = dict(estimates)
    for name, one in estimates.items():
        if (limits := RANGES.get(name.partition("/")[0])) is not None:
            found[name] = replace(one, low=limits[0], high=limits[1])
    return found


def metric_names(recipe: Recipe, *, held_out: int = 2) -> list[str]:
    """Names of the metrics that this recipe's evaluation computes.

    Args:
        held_out: number of pictures that a nonzero `encode.holdout` selects.

    Raises:
        WrongInput: a prompt file cannot be read.
    """
    sets = list(recipe.evaluate.prompts)
    names = [CLIP_SCORE, *by_set(CLIP_SCORE, sets)]
    if recipe.encode.holdout > 0 and held_out:
        if min(held_out, _compared_pictures(recipe)) >= LEAST_COMPARED:
            names += [CMMD, *DISTANCES]
            names += INCEPTION_DISTANCES if recipe.evaluate.inception is not None else []
        names += [HOLDOUT_LOSS, *holdout_loss.BANDS]
    names += [memorization.FEATURES, memorization.PIXELS]
    judges = judge_names(recipe.evaluate.judges)
    return names + [name for judge in judges for name in by_set(judge, sets)]


def hint_of_metric(metric: str, measured: Sequence[str]) -> str:
    """The remedy for a metric that is not measured: its setting, or the most similar name."""
    named = "fd_inception" if metric.lower() == "fid" else metric
    if named in INCEPTION_DISTANCES and named not in measured:
        return f"set evaluate.inception, whose network {named} needs"
    return hint_of(named, measured)


def lower_is_better(metric: str) -> bool:
    """Whether a lower value of a metric, or of a part such as `cmmd/NAME`, is better."""
    return metric.partition("/")[0] in LOWER_IS_BETTER


def by_set(metric: str, sets: Iterable[str]) -> list[str]:
    """The names of a metric of each prompt set."""
    return [f"{metric}/{name}" for name in sets]


def compared_sets(recipe: Recipe) -> tuple[str, ...]:
    """Names of the prompt sets whose pictures are compared with held-out ones."""
    return tuple(name for name, given in recipe.evaluate.prompts.items() if given.compare)


def sets_of_metric(metric: str, recipe: Recipe) -> tuple[str, ...]:
    """Names of the prompt sets whose pictures a metric is of; none of a held-out loss."""
    name, _, part = metric.partition("/")
    if name == HOLDOUT_LOSS:
        return ()
    if part:
        return (part,)
    if name in (CMMD, *DISTANCES, *INCEPTION_DISTANCES):
        return compared_sets(recipe)
    return tuple(recipe.evaluate.prompts)


def _compared_pictures(recipe: Recipe) -> int:
    sets = prompt_sets(recipe)
    return sum(len(sets[name]) for name in compared_sets(recipe))


def all_prompts(sets: PromptSets) -> list[str]:
    """The prompt of every picture, in the order of the sets."""
    return [prompt for prompts in sets.values() for prompt in prompts]


def prompt_numbers(sets: PromptSets) -> tuple[int, ...]:
    """The number of every picture's prompt, in the sets' order; equal texts are one prompt."""
    prompts = all_prompts(sets)
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    return tuple(numbers[prompt] for prompt in prompts)


def slices_by_set(sets: PromptSets) -> dict[str, slice]:
    """Prompt set name -> the slice of its pictures in `all_prompts`."""
    found, start = {}, 0
    for name, prompts in sets.items():
        found[name] = slice(start, start + len(prompts))
        start += len(prompts)
    return found
