"""The shortest valid recipe, for tests of stages that read few of its sections."""

from typing import Any

from configs.settings.recipe import Recipe


def shortest_recipe(**sections: Any) -> Recipe:
    """A recipe of these sections, and of those without which no recipe is valid."""
    needed = {
        "name": "test",
        "model": {"path": "unused"},
        "source": {"kind": "folder", "path": "."},
        "evaluate": {"clip": "unused", "prompts": {"all": {"prompts": ["a"]}}},
        "publish": {"name": "test"},
    }
    return Recipe.model_validate(needed | sections)
