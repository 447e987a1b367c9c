"""The JSON schema of recipes, for editors and docs/settings.md."""

from __future__ import annotations

from typing import Any

from configs.settings.recipe import Recipe


def json_schema() -> dict[str, Any]:
    """The JSON schema of a recipe file, for editors.

    Nothing but a source's kind is required, because `extends` can set everything else.
    """
    schema = Recipe.model_json_schema()
    schema["properties"]["extends"] = {"type": "string", "description": "Recipe to start from."}
    for section, name in (("Evaluate", "prompts"), ("Sweep", "values")):
        named = schema["$defs"][section]["properties"][name]
        named["additionalProperties"] = {"anyOf": [named["additionalProperties"], {"type": "null"}]}
    for section in (schema, *schema["$defs"].values()):
        required = section.pop("required", [])
        if "kind" in required:  # it selects the settings of a source
            section["required"] = ["kind"]
    return schema
