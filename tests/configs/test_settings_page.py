"""docs/settings.md has every setting of a recipe, as the schema has it."""

import re
from typing import Any

from kiln_command import ROOT

from configs import settings_page
from configs.load_recipe import dump, load_recipe, parse_yaml, recipe_names
from configs.settings.generate import Generate

PAGE = ROOT / "docs/settings.md"


def test_page_matches_the_schema() -> None:
    assert PAGE.read_text(encoding="utf-8") == settings_page.page()


def test_page_has_the_settings_of_generate() -> None:
    table = settings_page.page().partition("## `kiln generate`")[2]
    named = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    assert named == Generate.model_fields.keys() - {"model", "prompts"}


def leaves(value: Any, prefix: str = "") -> set[str]:
    """Dotted names of all settings in a resolved recipe."""
    if isinstance(value, dict) and value:
        return {name for key, one in value.items() for name in leaves(one, f"{prefix}{key}.")}
    return {prefix.rstrip(".")}


def test_page_has_every_setting_of_every_recipe() -> None:
    of_recipe = settings_page.page().partition("## `kiln generate`")[0]
    known = set(re.findall("^[|] `([^`]+)`", of_recipe, re.MULTILINE))
    free = ("evaluate.prompts.", "sweep.values.")  # names in these are the user's
    for recipe in recipe_names():
        for leaf in leaves(parse_yaml(dump(load_recipe(recipe)))):
            # Own sections of a source have the settings of the recipe's.
            name = re.sub(r"^sources\.[^.]+\.([^.]+).*", r"sources.NAME.\1", leaf)
            section = any(one.startswith(f"{name}.") for one in known)  # null, in this recipe
            assert name in known or section or name.startswith(free), name
