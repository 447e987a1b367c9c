"""The JSON schema of recipes, for editors and docs/settings.md."""

from __future__ import annotations

from typing import Any

from configs.settings.recipe import Recipe


def json_schema() -> dict[str, Any]:
    """The JSON schema of a recipe file, for editors."""
    schema = Recipe.model_json_schema()
    schema["properties"]["extends"] = {"type": "string", "description": "Recipe to start from."}
    schema.pop("required", None)
    return schema
