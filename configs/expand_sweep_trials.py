"""Load the trials of a sweep: the recipe with each combination of the swept values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import yaml

from configs.load_and_extend_recipe import RecipeError, load_recipe
from configs.settings.recipe import Recipe
from configs.settings.train_settings_in_cache_key import key_settings
from configs.settings.without_effect import with_defaults_without_effect
from configs.strict_yaml import parse_yaml


class Trial(NamedTuple):
    """One combination of values, and the recipe with them."""

    settings: dict[str, Any]  # dotted setting -> value
    recipe: Recipe

    @property
    def label(self) -> str:
        """The values in short: learning_rate=0.0001 lora.rank=8."""
        return " ".join(
            f"{name.removeprefix('train.')}={json.dumps(value)}"
            for name, value in self.settings.items()
        )


def load_trials(name: str, overrides: Mapping[str, Any]) -> list[Trial]:
    """The trials of a recipe's section `sweep`, in the order of the grid.

    Args:
        name: name or path of a recipe.
        overrides: dotted setting -> value, as of load_recipe; they may contain `sweep.values`.

    Raises:
        RecipeError: the recipe or a trial is invalid, or two trials train equal weights.
    """
    values = load_recipe(name, overrides).sweep.values
    if not values:
        raise RecipeError(
            f"recipe {name}: nothing to sweep: set sweep.values, or add `--set "
            "train.learning_rate=1e-4,3e-5`"
        )
    trials, known = [], dict[str, Trial]()
    for combination in product(*values.values()):
        settings = dict(zip(values, combination, strict=True))
        trial = Trial(settings, load_recipe(name, {**overrides, **settings}))
        used = with_defaults_without_effect(trial.recipe)
        same = known.setdefault(json.dumps(key_settings(used.train)), trial)
        if same is not trial:
            raise RecipeError(f"sweep: {same.label} and {trial.label} train equal weights")
        trials.append(trial)
    return trials


def add_values(overrides: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """Overrides whose `sweep.values` have those of options `--set` too, as parse_values reads each.

    Raises RecipeError, also for a setting that is named twice.
    """
    grid: dict[str, list[Any]] = {}
    for name, values in map(parse_values, texts):
        if name in grid:
            raise RecipeError(f"--set {name} is given twice: write {name}=value,value")
        grid[name] = values
    given = overrides.get("sweep.values", {})
    if not grid or not isinstance(given, dict):  # load_trials refuses what is no mapping
        return {**overrides}
    return {**overrides, "sweep.values": given | grid}


def parse_values(text: str) -> tuple[str, list[Any]]:
    """Split `train.lora.rank=4,8` into the dotted setting and its values. Raises RecipeError."""
    name, sign, values = text.partition("=")
    try:
        parsed = parse_yaml(f"[{values}]")
    except yaml.YAMLError:
        parsed = None
    if not sign or not name.strip() or not isinstance(parsed, list):
        raise RecipeError(f"--set {text!r}: write it as key=value,value")
    return name.strip(), parsed
