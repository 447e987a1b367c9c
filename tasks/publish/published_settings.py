"""The recipe as published: absolute local paths by the names of their folders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from configs.load_recipe import dump, parse_yaml
from configs.secrets import without_secrets
from configs.settings.recipe import Recipe

#: The start of a path that only this machine has.
ABSOLUTE = re.compile(r"(file|local)://|[/~]")
#: Settings whose values are no places.
TEXTS = {"description", "prompts"}


def published_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings of `dump` with names in place of absolute local paths.

    What lies in the folder of the base begins with the name of that folder.
    """
    base = recipe.model.path

    def shown(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {key: shown(one, key) for key, one in value.items()}
        if isinstance(value, list):
            return [shown(one, name) for one in value]
        if not isinstance(value, str) or name in TEXTS:
            return value
        if f"{value}/".startswith(f"{base}/"):
            return f"{base_name(base)}{value[len(base) :]}"
        return Path(value).name if ABSOLUTE.match(value) else value

    settings: dict[str, Any] = shown(parse_yaml(dump(recipe)))
    return settings


def hub_id(path: str) -> str | None:
    """A path that the hub's metadata may name: owner/name; None for folders and URLs."""
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.startswith((".", "~"))
    return path if is_id and not Path(path).is_dir() else None


def base_name(path: str) -> str:
    """A base as readers on other machines know it: hub id or URL, of a local folder its name."""
    return Path(path).absolute().name if is_local(path) else without_secrets(path)


def place_in_code(path: str, folder: str = "path/to") -> str:
    """A model as the card's code names it: `base_name`, which of a local folder is in `folder`."""
    return f"{folder}/{base_name(path)}" if is_local(path) else base_name(path)


def is_local(path: str) -> bool:
    """Whether only this machine has what is at a path."""
    return bool(ABSOLUTE.match(path)) or ("://" not in path and hub_id(path) is None)
