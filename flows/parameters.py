"""Parameters of the flows: checked by pydantic before a run, shown as a form in the UI."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationInfo

from configs.hide_secrets import hide_secrets
from configs.load_and_extend_recipe import RecipeError, find_recipe, load_recipe, recipe_names

NO_OVERRIDES: dict[str, Any] = {}


def _reveal(settings: Any) -> Any:
    if isinstance(settings, dict):
        return {key: _reveal(value) for key, value in settings.items()}
    if isinstance(settings, list):
        return [_reveal(value) for value in settings]
    return settings.get_secret_value() if isinstance(settings, SecretStr) else settings


def _revealed(settings: Any) -> Any:
    """The settings with their secrets. Raises RecipeError for one that Prefect has stored."""
    if hide_secrets(settings) != settings:
        raise RecipeError(
            "a secret in a parameter is refused, since Prefect stores it: write it into a recipe "
            "file, or start the run by `kiln run`; and replace the secret"
        )
    return _reveal(settings)


def _find(recipe: str) -> str:
    find_recipe(recipe)
    return recipe


def _check(overrides: dict[str, Any], others: ValidationInfo) -> dict[str, Any]:
    if "recipe" in others.data:  # otherwise its own error is reported
        load_recipe(others.data["recipe"], overrides)
    return overrides


RecipeName = Annotated[str, AfterValidator(_find), Field(examples=recipe_names())]
Settings = Annotated[dict[str, Any], BeforeValidator(_revealed)]
Overrides = Annotated[Settings, AfterValidator(_check), Field(examples=[{"train.steps": 100}])]
