"""Parameters of the flow: checked by pydantic before a run, shown as a form in the UI."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo

from configs.load import find_recipe, load_recipe, recipe_names

NO_OVERRIDES: dict[str, Any] = {}


def _find(recipe: str) -> str:
    find_recipe(recipe)
    return recipe


def _check(overrides: dict[str, Any], others: ValidationInfo) -> dict[str, Any]:
    if "recipe" in others.data:  # otherwise its own error is reported
        load_recipe(others.data["recipe"], overrides)
    return overrides


RecipeName = Annotated[str, AfterValidator(_find), Field(examples=recipe_names())]
Overrides = Annotated[
    dict[str, Any], AfterValidator(_check), Field(examples=[{"train.steps": 100}])
]
