"""Settings that another one disables: they are told, and are no part of any key."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from configs.settings.base_section import Section
from configs.settings.recipe import Recipe

AnySection = TypeVar("AnySection", bound=Section)


BIAS = ("train.timesteps.bias_strategy",)


class Needs(NamedTuple):
    """Settings that have an effect with certain values of others."""

    names: tuple[str, ...]
    others: tuple[str, ...]
    have_effect: Callable[..., Any]  # of the values of `others`


#: A recipe may inherit such a value, so that it is no error. `Section.refuse_changed` is stricter,
#: for what a runtime, a device or a model does not support.
TABLE = (
    Needs(("encode.bucket_step", "encode.max_aspect"), ("encode.aspect_buckets",), lambda on: on),
    Needs(
        ("encode.seed",),
        ("encode.crop", "encode.masks"),
        lambda crop, masks: crop == "random" or masks,
    ),
    Needs(("train.lora", "publish.merge"), ("train.method",), lambda method: method == "lora"),
    Needs(("train.lr_min_ratio",), ("train.lr_scheduler",), lambda name: name != "constant"),
    Needs(
        ("train.lr_num_cycles",),
        ("train.lr_scheduler",),
        lambda name: name == "cosine_with_restarts",
    ),
    Needs(("train.lr_power",), ("train.lr_scheduler",), lambda name: name == "polynomial"),
    Needs(
        ("train.adam_betas", "train.adam_epsilon"),
        ("train.optimizer",),
        lambda name: name != "adafactor",
    ),
    Needs(("train.ema_every_n_steps",), ("train.ema_decay",), lambda decay: decay is not None),
    Needs(("train.allow_tf32",), ("train.mixed_precision",), lambda name: name == "no"),
    Needs(
        ("train.timesteps.logit_mean", "train.timesteps.logit_std"),
        ("train.timesteps.distribution",),
        lambda name: name == "logit_normal",
    ),
    Needs(("train.timesteps.bias_multiplier",), BIAS, lambda name: name != "none"),
    Needs(("train.timesteps.bias_portion",), BIAS, lambda name: name in ("earlier", "later")),
    Needs(
        ("train.timesteps.bias_begin", "train.timesteps.bias_end"),
        BIAS,
        lambda name: name == "range",
    ),
    Needs(("train.mindspore.jit_level",), ("train.mindspore.mode",), lambda name: name == "graph"),
    Needs(
        ("train.holdout_loss.samples", "train.holdout_loss.draws"),
        ("train.holdout_loss.every_n_steps",),
        lambda steps: steps,
    ),
    Needs(
        ("train.divergence.patience",),
        ("train.divergence.factor",),
        lambda factor: factor is not None,
    ),
    Needs(
        ("train.divergence.max_skips",),
        ("train.divergence.action",),
        lambda action: action == "skip",
    ),
    Needs(("train.profile.start",), ("train.profile.steps",), lambda steps: steps),
    Needs(
        tuple(f"retrain.{name}" for name in ("epochs", "max_steps", "replay", "learning_rate")),
        ("retrain.start",),
        lambda start: start == "champion",
    ),
)


def settings_without_effect(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(dotted setting, what disables it) of each value that is not the default and is not used."""
    for row in TABLE:
        values = [attrgetter(name)(recipe) for name in row.others]
        if row.have_effect(*values):
            continue
        choice = " and ".join(
            f"{name}: {value if isinstance(value, str) else json.dumps(value)}"
            for name, value in zip(row.others, values, strict=True)
        )
        for name in row.names:
            if attrgetter(name)(recipe) != _default(recipe, name):
                yield name, choice


def warnings_without_effect(recipe: Recipe) -> list[str]:
    """A line for each setting without effect."""
    return [f"{name} has no effect with {why}" for name, why in settings_without_effect(recipe)]


def with_defaults_without_effect(recipe: Recipe) -> Recipe:
    """The recipe with the default of each setting without effect: equal runs have equal keys."""
    for name, _ in settings_without_effect(recipe):
        recipe = _with(recipe, name, _default(recipe, name))
    return recipe


def _default(recipe: Recipe, dotted: str) -> Any:
    section, _, name = dotted.rpartition(".")
    return type(attrgetter(section)(recipe)).model_fields[name].default


def _with(section: AnySection, dotted: str, value: Any) -> AnySection:
    name, _, rest = dotted.partition(".")
    new = _with(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: new})
