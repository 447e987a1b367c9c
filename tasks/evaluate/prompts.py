"""The prompts of an evaluation, set by set, one for each picture to draw."""

from __future__ import annotations

import re

import fsspec

from configs.schema import PromptSet, Recipe
from runtimes.contract import WrongInput

PromptSets = dict[str, tuple[str, ...]]
MOST_SAMPLES = 8


def prompt_sets(recipe: Recipe) -> PromptSets:
    """Name -> the prompt of every picture, in order. Raises WrongInput for a file not there."""
    return {name: _expand(name, given) for name, given in recipe.evaluate.prompts.items()}


def sample_prompts(recipe: Recipe) -> tuple[str, ...]:
    """A few distinct prompts to draw while training: the first of each set, then the second, ..."""
    sets = [list(dict.fromkeys(prompts)) for prompts in prompt_sets(recipe).values()]
    longest = max(len(prompts) for prompts in sets)
    turns = (prompts[i] for i in range(longest) for prompts in sets if i < len(prompts))
    return tuple(dict.fromkeys(turns))[:MOST_SAMPLES]


def _expand(name: str, given: PromptSet) -> tuple[str, ...]:
    if re.fullmatch(r"[A-Za-z0-9_.-]+", name) is None:
        raise WrongInput(f"evaluate.prompts: name {name!r}: use letters, digits, _, . and - only")
    prompts = given.prompts or read_prompts(f"evaluate.prompts.{name}.file", str(given.file))
    return tuple(prompt for prompt in prompts for _ in range(given.images_per_prompt))


def read_prompts(setting: str, url: str) -> tuple[str, ...]:
    """The lines of a text file at any fsspec URL. Raises WrongInput, naming the setting."""
    try:
        with fsspec.open(url, "r", encoding="utf-8") as stream:
            prompts = tuple(line.strip() for line in stream if line.strip())
    except (OSError, ValueError) as error:
        raise WrongInput(f"{setting}: {url} cannot be read: {error}") from None
    if not prompts:
        raise WrongInput(f"{setting}: {url} has no prompt")
    return prompts
