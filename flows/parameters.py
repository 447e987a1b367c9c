"""Parameters of the flows: shown as a form in the UI, checked in the run.

An error in pydantic's own check would reach people as a traceback with Prefect's words, and Prefect
would log all parameters beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from prefect import runtime
from pydantic import Field, SecretStr

from configs.load_recipe import RecipeError, recipe_names
from configs.secrets import hide_secrets, without_secrets

NO_OVERRIDES: dict[str, Any] = {}
RecipeName = Annotated[str, Field(examples=recipe_names())]
Overrides = Annotated[dict[str, Any], Field(examples=[{"train.steps": 100}])]


def run_name(words: str) -> Callable[[], str]:
    """The name of a flow's run, such as "finetune {recipe}", without secrets of its parameters."""
    return lambda: without_secrets(words.format(**runtime.flow_run.parameters))


def revealed(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with their secrets. Raises RecipeError for one that Prefect has stored."""
    if hide_secrets(settings) != settings:
        raise RecipeError(
            "a secret in a parameter is refused, since Prefect stores it: write it into a recipe "
            "file, or start the run by `kiln run`; and replace the secret"
        )
    found: dict[str, Any] = _reveal(settings)
    return found


def _reveal(settings: Any) -> Any:
    if isinstance(settings, dict):
        return {key: _reveal(value) for key, value in settings.items()}
    if isinstance(settings, list):
        return [_reveal(value) for value in settings]
    return settings.get_secret_value() if isinstance(settings, SecretStr) else settings
