"""Parameters of the flows: checked by pydantic before a run, shown as a form in the UI."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationInfo

from configs.load_recipe import RecipeError, find_recipe, load_recipe, recipe_names
from configs.redact_urls import has_secrets, is_secret_name

NO_OVERRIDES: dict[str, Any] = {}


def hide_secrets(settings: Any, name: str = "") -> Any:
    """The settings with each secret as a SecretStr, of which Prefect stores asterisks."""
    if isinstance(settings, dict):
        return {key: hide_secrets(value, key) for key, value in settings.items()}
    if isinstance(settings, list):
        return [hide_secrets(value, name) for value in settings]
    if isinstance(settings, str) and (has_secrets(settings) or is_secret_name(name)):
        return SecretStr(settings)
    return settings


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
