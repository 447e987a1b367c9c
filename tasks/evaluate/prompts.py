"""The prompt sets of an evaluation: one prompt per picture."""

from __future__ import annotations

import re

import fsspec

from artifacts.remote_stores import is_of_client, is_outage, remedy, web_cause
from configs.secrets import one_line
from configs.settings.evaluate import PromptSet
from configs.settings.recipe import Recipe
from runtimes.contract import WrongInput
from tasks.build_or_reuse import TransientError

PromptSets = dict[str, tuple[str, ...]]
MAX_SAMPLES = 8


def prompt_sets(recipe: Recipe) -> PromptSets:
    """Prompt set name -> the prompt of every picture.

    Raises:
        WrongInput: a prompt file cannot be read, or the name has unsupported characters.
    """
    return {name: _expand(name, given) for name, given in recipe.evaluate.prompts.items()}


def sample_prompts(recipe: Recipe) -> tuple[str, ...]:
    """Up to 8 distinct prompts for samples during training, alternating between the sets."""
    sets = [list(dict.fromkeys(prompts)) for prompts in prompt_sets(recipe).values()]
    longest = max(len(prompts) for prompts in sets)
    alternating = (prompts[i] for i in range(longest) for prompts in sets if i < len(prompts))
    return tuple(dict.fromkeys(alternating))[:MAX_SAMPLES]


def _expand(name: str, given: PromptSet) -> tuple[str, ...]:
    if re.fullmatch(r"[A-Za-z0-9_.-]+", name) is None:
        raise WrongInput(f"evaluate.prompts: name {name!r}: use letters, digits, _, . and - only")
    prompts = given.prompts or read_prompts(f"evaluate.prompts.{name}.file", str(given.file))
    return tuple(prompt for prompt in prompts for _ in range(given.images_per_prompt))


def read_prompts(setting: str, url: str) -> tuple[str, ...]:
    """The non-empty lines of a UTF-8 text file at an fsspec URL.

    Raises:
        WrongInput: the file cannot be read or has no prompt; the message names `setting`.
        TransientError: its store does not respond.
    """
    try:
        with fsspec.open(url, "r", encoding="utf-8-sig") as stream:
            prompts = tuple(line.strip() for line in stream if line.strip())
    except Exception as error:  # clients of remote stores define their own exception types
        cause = web_cause(url, error)
        if isinstance(cause, FileNotFoundError):
            raise WrongInput(f"{setting}: {url}: no such file") from None
        why = getattr(cause, "strerror", None) or one_line(cause)
        if is_outage(cause):
            raise TransientError(
                f"{setting}: {url} cannot be read ({why}): {remedy(cause)}"
            ) from error
        if not isinstance(cause, OSError | ValueError) and not is_of_client(cause):
            raise
        raise WrongInput(f"{setting}: {url} cannot be read: {why}") from None
    if not prompts:
        raise WrongInput(f"{setting}: {url} has no prompt: write one per line")
    return prompts
