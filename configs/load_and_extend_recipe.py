"""Load a recipe: find its file, resolve `extends`, apply dotted overrides and validate."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from configs.explain_recipe_errors import explain
from configs.nearest_name import hint_of
from configs.redact_errors_and_logs import one_line
from configs.redact_urls import is_secret, without_secrets
from configs.settings.recipe import Recipe
from configs.strict_yaml import dump_yaml, parse_option, parse_yaml

RECIPES = Path(__file__).parent


class RecipeError(ValueError):
    """A recipe is invalid; the message names the file, the setting and the remedy."""


def recipe_names() -> list[str]:
    """Names of the recipes in this package."""
    return sorted(p.stem for p in RECIPES.glob("*.yaml"))


def load_recipe(name: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Load a recipe.

    Args:
        name: a name of `recipe_names`, or a path that ends in .yaml or .yml.
        overrides: dotted setting, such as `train.steps` -> value.

    Raises:
        RecipeError: the recipe or a setting is unknown, or a value has the wrong type or range.
    """
    path = find_recipe(name)
    settings = _read(path, seen=())
    overrides = overrides or {}
    for dotted in overrides.keys() & {"source.kind", "train.epochs", "train.steps"}:
        section, setting = dotted.split(".")  # what these replace is not inherited
        settings = _merge(settings, {section: {setting: overrides[dotted]}}, "override ")
    for dotted, value in overrides.items():
        name = dotted.rpartition(".")[2]
        _set(settings, dotted, anchored({name: value}, Path.cwd())[name])
    try:
        recipe = Recipe.model_validate(settings)
    except ValidationError as error:
        leaves = list(_leaves(overrides))
        raise RecipeError(explain(path.name, error, settings, overridden=leaves)) from None
    return recipe


def _leaves(settings: Mapping[str, Any], section: str = "") -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{section}{name}.")
        else:
            yield f"{section}{name}"


def find_recipe(name: str) -> Path:
    """The file of a recipe, by name or path. Raises RecipeError if there is none."""
    is_path = name.endswith((".yaml", ".yml"))
    path = Path(name) if is_path else RECIPES / f"{name}.yaml"
    if os.path.isfile(path):  # Path.is_file raises for a name that is too long
        return path
    if is_path:
        raise RecipeError(f"recipe {name}: no such file")
    if os.path.isfile(f"{name}.yaml"):
        raise RecipeError(f"recipe {name}: not found (did you mean {name}.yaml?)")
    hint = hint_of(name, recipe_names())
    raise RecipeError(f"recipe {name}: not found ({hint}; or give a path ending in .yaml)")


def parse_override(text: str) -> tuple[str, Any]:
    """Split `train.steps=100` into the dotted setting and its YAML value. Raises RecipeError."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise RecipeError(f"override {text!r}: write it as key=value, such as train.steps=100")
    try:
        return key.strip(), parse_option(value)
    except yaml.YAMLError:
        raise RecipeError(f"override {key}: the value is not valid YAML") from None


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML, complete except for secrets."""
    settings = _redacted(json.loads(recipe.model_dump_json()))
    return dump_yaml(settings)


def _redacted(value: Any, name: str = "") -> Any:
    """The value without secrets, because published cards contain the dump."""
    if isinstance(value, dict):
        return {key: _redacted(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_redacted(item, name) for item in value]
    if is_secret(name, value):
        return "..."
    return without_secrets(value) if isinstance(value, str) else value


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in seen:
        raise RecipeError(f"{path.name}: `extends` forms a cycle")
    try:
        settings = parse_yaml(path.read_text(encoding="utf-8")) or {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        raise RecipeError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not valid YAML: {one_line(error)}") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    if not isinstance(settings, dict):
        raise RecipeError(f"{path.name}: a recipe is a mapping of settings")
    settings = anchored(settings, path.parent)
    parent = settings.pop("extends", None)
    if parent is None:
        return settings
    try:
        extended = find_recipe(str(parent))
    except RecipeError as error:
        beside = os.path.isfile(path.parent / str(parent))
        hint = f" (did you mean ./{parent}?)" if beside else ""
        raise RecipeError(f"{path.name}: extends: {error}{hint}") from None
    return _merge(_read(extended, (*seen, path)), settings, f"{path.name}: ")


def anchored(value: Any, folder: Path) -> Any:
    """Resolve strings that start with ./ or ../ by the folder of their recipe, ~/ by the user's.

    A prompt is none of these.
    """
    if isinstance(value, dict):
        return {
            key: item if key == "prompts" and isinstance(item, list) else anchored(item, folder)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [anchored(item, folder) for item in value]
    if isinstance(value, str) and value.startswith(("./", "../")):
        return str((folder / value).resolve())
    if isinstance(value, str) and value.startswith("~/"):
        return os.path.expanduser(value)
    return value


def _merge(base: dict[str, Any], over: dict[str, Any], where: str) -> dict[str, Any]:
    """`base` with the values of `over`, section by section.

    Args:
        where: the start of an error: the file or override, and the section.
    """
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and not _replaces(key, old, value):
            if old and not value:
                raise RecipeError(
                    f"{where}{key}: {{}} changes nothing of {', '.join(map(str, old))}: remove it, "
                    "or set what it shall change"
                )
            value = _merge(_inherited(key, old, value), value, f"{where}{key}.")
        merged[key] = value
    return merged


def _inherited(section: str, old: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The old section without the other of `train.steps` and `train.epochs`, if one is new."""
    given = {name for name in ("steps", "epochs") if new.get(name) is not None}
    if section != "train" or len(given) != 1:
        return old
    return {name: value for name, value in old.items() if name not in {"steps", "epochs"} - given}


def _replaces(section: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a section takes nothing from the old one: a source of another kind."""
    return section == "source" and new.get("kind", old.get("kind")) != old.get("kind")


def _set(settings: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for depth, part in enumerate(parents):
        if settings.get(part) is None:  # absent, or null as in a resolved recipe
            settings[part] = {}
        settings = settings[part]
        if not isinstance(settings, dict):
            where = ".".join(parents[: depth + 1])
            raise RecipeError(f"override {dotted}: {where} is a value, not a section")
    section = "".join(f"{name}." for name in parents)
    settings.update(_merge({last: settings.get(last)}, {last: value}, f"override {section}"))
