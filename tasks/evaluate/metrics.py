"""The metrics of an evaluation: names, table rows, prompts and held-out losses.

Table rows are for the Prefect UI, the report and the model card. A prompt set has one prompt per
picture; prompts of an edit model have reference pictures. The held-out loss is measured at eight
equidistant noise levels, each with all held-out samples. A metric's name determines the pictures
that it is of. The sample pictures that a training run draws have scores of their own.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import numpy as np
from PIL import Image

from artifacts.errors import reading
from configs.errors import Refused
from configs.explain_errors import hint_of
from configs.settings.evaluate import Edit, Evaluate, JudgeName, PreferenceModel, PromptSet
from configs.settings.recipe import Recipe
from configs.settings.train_parts import HOLDOUT_LOSS
from tasks.evaluate import distances, memorization
from tasks.evaluate.draw import HeldOutLosses
from tasks.evaluate.edits import Prompt, placeholder
from tasks.evaluate.features import Clip, Float32
from tasks.evaluate.judges import clip_scores, judge_names, judge_pictures, open_judges
from tasks.panels import human

MODELS = ("base", "tuned", "champion")
Value = TypeVar("Value")


def metric_rows(
    metrics: Mapping[str, Mapping[str, distances.Metric]],
    differences: Mapping[str, Mapping[str, distances.Metric]],
) -> list[dict[str, Any]]:
    """Table rows, one per metric: value of each model, and the differences, with 95% intervals.

    Args:
        metrics: metric name -> model -> metric.
        differences: metric name -> other model -> {"value", "ci"} of tuned - other.
    """
    measured = [model for model in MODELS if any(model in models for models in metrics.values())]
    others = [model for model in measured if any(model in m for m in differences.values())]
    return [
        {
            "metric": name,
            **{model: with_interval(models.get(model)) for model in measured},
            **{
                f"tuned - {model}": with_interval(differences.get(name, {}).get(model))
                for model in others
            },
            "samples": models["tuned"]["n"],
        }
        for name, models in metrics.items()
    ]


def with_interval(metric: distances.Metric | None) -> str:
    """A metric and its interval, if there is any, as text; a dash if it was not measured."""
    if metric is None:
        return "—"
    if metric["ci"] is None:
        return human(float(metric["value"]))
    low, high = metric["ci"]
    return f"{human(float(metric['value']))} [{human(float(low))}, {human(float(high))}]"


PromptSets = dict[str, tuple[Prompt, ...]]
#: Prompt set with `held_out` -> its prompts, once the held-out pictures are there.
HeldOutPrompts = Mapping[str, Sequence[Prompt]]
MAX_SAMPLES = 8


def prompt_sets(settings: Evaluate) -> PromptSets:
    """Prompt set name -> the prompt of every picture of the first round.

    Prompts of held-out samples are placeholders.

    Raises:
        Refused: a prompt file cannot be read, or the name has unsupported characters.
    """
    return prompt_rounds(settings, 1)[0]


def prompt_rounds(
    settings: Evaluate, count: int, held_out: HeldOutPrompts | None = None
) -> tuple[PromptSets, ...]:
    """As `prompt_sets`, for each of `count` rounds.

    A round has the next `prompts_per_round` prompts of each list. After the last prompt it begins
    again with the first: its pictures are new, since a picture's number selects its noise.

    Args:
        held_out: prompts of the sets of held-out samples; None: placeholders.
    """
    lists = listed_prompts(settings) | dict(held_out or {})
    return tuple(
        {name: _of_round(lists[name], chosen, number) for name, chosen in settings.prompts.items()}
        for number in range(count)
    )


def listed_prompts(settings: Evaluate) -> PromptSets:
    """Prompt set name -> its prompts. Raises Refused as `prompt_sets`."""
    lists: PromptSets = {}
    for name, chosen in settings.prompts.items():
        if re.fullmatch(r"[A-Za-z0-9_.-]+", name) is None:
            words = f"name {name!r}: use letters, digits, _, . and - only"
            raise Refused(words, setting="evaluate.prompts")
        setting = f"evaluate.prompts.{name}.file"
        if chosen.held_out:
            lists[name] = tuple(map(placeholder, range(chosen.held_out)))
        else:
            listed = chosen.prompts or read_prompts(setting, str(chosen.file))
            lists[name] = tuple(map(Prompt.of, listed))
    return lists


def _of_round(prompts: Sequence[Prompt], chosen: PromptSet, number: int) -> tuple[Prompt, ...]:
    size = min(chosen.prompts_per_round or len(prompts), len(prompts))
    part = islice(cycle(prompts), number * size, (number + 1) * size)
    return tuple(prompt for prompt in part for _ in range(chosen.images_per_prompt))


def most_rounds(settings: Evaluate) -> int:
    """How many rounds `evaluate.max_pictures` allows; one without it.

    Raises:
        Refused: a round has more pictures; or as `prompt_sets`.
    """
    if settings.max_pictures is None:
        return 1
    pictures = sum(map(len, prompt_sets(settings).values()))
    if settings.max_pictures < pictures:
        words = f"is {settings.max_pictures}, but a round has {pictures} pictures: set it to that"
        raise Refused(f"{words}, or list fewer prompts", setting="evaluate.max_pictures")
    return settings.max_pictures // pictures


def sample_prompts(settings: Evaluate) -> tuple[str, ...]:
    """Up to 8 distinct prompts for samples during training, alternating between the sets.

    Prompts with references are left out: a training draws without them.
    """
    sets = [
        list(dict.fromkeys(prompt.text for prompt in prompts if not prompt.references))
        for name, prompts in prompt_sets(settings).items()
        if not settings.prompts[name].held_out
    ]
    longest = max(map(len, sets), default=0)
    alternating = (prompts[i] for i in range(longest) for prompts in sets if i < len(prompts))
    return tuple(dict.fromkeys(alternating))[:MAX_SAMPLES]


def read_prompts(setting: str, url: str) -> tuple[str, ...]:
    """The non-empty lines of a UTF-8 text file at an fsspec URL.

    Raises:
        Refused: the file cannot be read or has no prompt; the message names `setting`.
        Away: its store does not respond.
    """
    with reading(f"{setting}: {url}", url), fsspec.open(url, "r", encoding="utf-8-sig") as stream:
        prompts = tuple(line.strip() for line in stream if line.strip())
    if not prompts:
        raise Refused(f"{url} has no prompt: write one per line", setting=setting)
    return prompts


#: As MLPerf's text-to-image benchmark validates: equidistant levels with equal counts. Ours are the
#: middles of eight equal bands, so that their mean approximates the loss over all levels.
LEVELS = 8
#: Metric names of the bands, from the least noise to the most.
BANDS = tuple(f"{HOLDOUT_LOSS}/level{number}" for number in range(1, LEVELS + 1))


def holdout_losses(
    found: HeldOutLosses, learnt: Collection[str], resampling: distances.Resampling
) -> dict[str, distances.Estimate]:
    """The mean loss and that of each band, of the sources to learn; and that of each source.

    Intervals resample held-out samples.

    Args:
        learnt: sources of a mixture without regularisation. If none has a held-out sample, the mean
            is of all sources.
    """
    losses = found.losses[[source in learnt for source in found.sources]]
    if not len(losses):
        losses = found.losses
    if not len(losses):
        return {}
    parts = {f"{HOLDOUT_LOSS}/{name}": rows for name, rows in found.by_source().items()}
    return {
        **{
            name: distances.mean(rows.mean(axis=1), resampling)
            for name, rows in {HOLDOUT_LOSS: losses, **parts}.items()
        },
        **{name: distances.mean(losses[:, n], resampling) for n, name in enumerate(BANDS)},
    }


def losses_by_level(found: HeldOutLosses) -> dict[str, list[float]]:
    """Source of a mixture -> its mean held-out loss in each band."""
    return {name: rows.mean(axis=0).tolist() for name, rows in found.by_source().items()}


def level_rows(by_model: Mapping[str, Mapping[str, Sequence[float]]]) -> list[dict[str, Any]]:
    """Table rows, one per source and model, with the loss in each band.

    Args:
        by_model: model -> `losses_by_level`.
    """
    return [
        {"source": source, "model": model}
        | {f"level {number}": human(loss) for number, loss in enumerate(losses[source], 1)}
        for source in by_model["tuned"]
        for model, losses in by_model.items()
    ]


#: End of the names of metrics on `evaluate.model`.
SIBLING = "@sibling"
CLIP_SCORE = "clip_score"
CMMD = "cmmd"
#: Cosine of features of the image encoder, of a picture and its target or its references.
TARGET = "target_similarity"
REFERENCE = "reference_similarity"
#: Likeness of pixels to the first reference, where the mask allows no change.
KEPT = "kept_similarity"
SIMILARITIES = (TARGET, REFERENCE, KEPT)
#: Distances need this many pictures of a model, and as many held-out pictures.
LEAST_COMPARED = 2
#: Metrics, and the bands and prompt sets of metrics, whose lower value is better.
LOWER_IS_BETTER = (
    *(HOLDOUT_LOSS, CMMD, "fd", "kid", *distances.INCEPTION_DISTANCES),
    *(memorization.FEATURES, memorization.PIXELS),
)
#: Metric, with its bands and prompt sets -> its range, to which intervals are cut.
RANGES: dict[str, distances.Interval] = {
    CLIP_SCORE: (0.0, 100.0),
    **dict.fromkeys((TARGET, REFERENCE), (-1.0, 1.0)),
    KEPT: (0.0, 1.0),
    **dict.fromkeys((HOLDOUT_LOSS, CMMD, "fd", "fd_inception"), (0.0, math.inf)),
}


def with_ranges(estimates: distances.Estimates) -> dict[str, distances.Estimate]:
    """The estimates of metrics by name, with the metrics' ranges."""
    ranged = dict(estimates)
    for name, estimate in estimates.items():
        if (limits := RANGES.get(kind_of(name))) is not None:
            ranged[name] = replace(estimate, low=limits[0], high=limits[1])
    return ranged


def metric_names(recipe: Recipe, *, held_out: int = 2) -> list[str]:
    """Names of the metrics that this recipe's evaluation computes.

    Args:
        held_out: number of pictures that a nonzero `encode.holdout` selects.

    Raises:
        Refused: a prompt file cannot be read.
    """
    sets = list(recipe.evaluate.prompts)
    names = [CLIP_SCORE, *by_set(CLIP_SCORE, sets)]
    for metric in SIMILARITIES:
        edited = sets_of_metric(metric, recipe.evaluate)
        if metric == REFERENCE and not recipe.has_references:
            edited = tuple(n for n in edited if not recipe.evaluate.prompts[n].held_out)
        names += [metric, *by_set(metric, edited)] if edited else []
    sources = [name for name, part in recipe.by_source.items() if part.encode.holdout > 0]
    if sources and held_out:
        pictures = prompt_sets(recipe.evaluate)
        compared = sum(len(pictures[name]) for name in compared_sets(recipe.evaluate))
        if min(held_out, compared) >= LEAST_COMPARED:
            names += [CMMD, *distances.DISTANCES]
            names += distances.INCEPTION_DISTANCES if recipe.evaluate.inception is not None else []
        names += [HOLDOUT_LOSS, *by_set(HOLDOUT_LOSS, sorted(filter(None, sources))), *BANDS]
    names += [memorization.FEATURES, memorization.PIXELS]
    judges = judge_names(recipe.evaluate.judges)
    names += [name for judge in judges for name in by_set(judge, sets)]
    if recipe.evaluate.model is not None:
        names += on_sibling({n: n for n in names if kind_of(n) != HOLDOUT_LOSS})
    return names


def kind_of(metric: str) -> str:
    """The metric without its prompt set, band and base: `cmmd` of `cmmd/new@sibling`."""
    return metric.removesuffix(SIBLING).partition("/")[0]


def on_sibling(metrics: Mapping[str, Value]) -> dict[str, Value]:
    """Metrics by their names on `evaluate.model`."""
    return {f"{name}{SIBLING}": value for name, value in metrics.items()}


def hint_of_metric(metric: str, measured: Sequence[str]) -> str:
    """The remedy for a metric that is not measured: its setting, or the most similar name."""
    named = "fd_inception" if metric.lower() == "fid" else metric
    if named in distances.INCEPTION_DISTANCES and named not in measured:
        return f"set evaluate.inception, whose network {named} needs"
    return hint_of(named, measured)


def lower_is_better(metric: str) -> bool:
    """Whether a lower value of a metric, or of a part such as `cmmd/NAME`, is better."""
    return kind_of(metric) in LOWER_IS_BETTER


def by_set(metric: str, sets: Iterable[str]) -> list[str]:
    """The names of a metric of each prompt set."""
    return [f"{metric}/{name}" for name in sets]


def compared_sets(settings: Evaluate) -> tuple[str, ...]:
    """Names of the prompt sets whose pictures are compared with held-out pictures."""
    return tuple(name for name, listed in settings.prompts.items() if listed.compare)


def sets_of_metric(metric: str, settings: Evaluate) -> tuple[str, ...]:
    """Names of the prompt sets whose pictures a metric is of; none of a held-out loss."""
    name, _, part = metric.removesuffix(SIBLING).partition("/")
    if name == HOLDOUT_LOSS:
        return ()
    if part:
        return (part,)
    if name in SIMILARITIES:
        return _edited_sets(name, settings)
    if name in (CMMD, *distances.DISTANCES, *distances.INCEPTION_DISTANCES):
        return compared_sets(settings)
    return tuple(settings.prompts)


def _edited_sets(metric: str, settings: Evaluate) -> tuple[str, ...]:
    """Names of the prompt sets that a likeness is of, by the settings alone."""

    def has(chosen: PromptSet) -> bool:
        edits = [prompt for prompt in chosen.prompts if isinstance(prompt, Edit)]
        if metric == KEPT:
            return any(edit.mask for edit in edits)
        return bool(chosen.held_out or (edits and metric == REFERENCE))

    return tuple(name for name, chosen in settings.prompts.items() if has(chosen))


def all_prompts(*rounds: PromptSets) -> list[Prompt]:
    """The prompt of every picture, in the order of the rounds and of the sets in each."""
    return [prompt for sets in rounds for prompts in sets.values() for prompt in prompts]


def prompt_numbers(*rounds: PromptSets) -> tuple[int, ...]:
    """The number of every picture's prompt, as `all_prompts`; equal prompts are one."""
    prompts = all_prompts(*rounds)
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    return tuple(numbers[prompt] for prompt in prompts)


def pictures_by_set(*rounds: PromptSets) -> dict[str, list[int]]:
    """Prompt set name -> the numbers of its pictures in `all_prompts`."""
    numbers: dict[str, list[int]] = {}
    start = 0
    for sets in rounds:
        for name, prompts in sets.items():
            numbers.setdefault(name, []).extend(range(start, start + len(prompts)))
            start += len(prompts)
    return numbers


def sample_metrics(judges: Sequence[JudgeName | PreferenceModel]) -> list[str]:
    """Names of the scores that `SampleScorer` computes."""
    small = [judge for judge in judges if not isinstance(judge, PreferenceModel)]
    return [CLIP_SCORE, *judge_names(small)]


class SampleScorer:
    """Scores samples with a recipe's CLIP model and judges, on the CPU: training has the device.

    Args:
        judges: the recipe's judges; preference models are left out, since they are large.
        clip: folder of the CLIP model, loaded at the first call.
        prompts: one per picture.
    """

    def __init__(
        self, judges: Sequence[JudgeName | PreferenceModel], clip: Path, prompts: Sequence[str]
    ) -> None:
        self._judges = open_judges(judges, {}, "cpu")
        self._folder = clip
        self._prompts = prompts

    def __call__(self, strip: bytes) -> dict[str, float]:
        """The mean CLIPScore ("clip_score") and the mean score of each judge, by name.

        Args:
            strip: PNG bytes with one picture per prompt, left to right, all of one width.

        Raises:
            Refused: the CLIP model fails to load, or a judge does not support the pictures.
        """
        whole = np.asarray(Image.open(io.BytesIO(strip)).convert("RGB"))
        pictures = np.stack(np.split(whole, len(self._prompts), axis=1))
        scores = clip_scores(self._clip.images(pictures), self._texts)
        judged = judge_pictures(self._judges, pictures, self._prompts)
        means = {name: float(judgements.mean()) for name, judgements in judged.items()}
        return {CLIP_SCORE: float(scores.mean()), **means}

    @cached_property
    def _clip(self) -> Clip:
        return Clip(self._folder, "cpu")

    @cached_property
    def _texts(self) -> Float32:
        return self._clip.texts(self._prompts)
