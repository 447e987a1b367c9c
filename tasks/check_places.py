"""Whether the work pools of a recipe's `place` reach what they need, and the recipe they get."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import SecretStr, ValidationError

from configs.explain_errors import explain
from configs.load_recipe import RECIPES, RecipeError, anchored
from configs.secrets import hide_secrets, without_secrets
from configs.settings.data import Source
from configs.settings.recipe import Recipe, StageName
from tasks.beam_workers import Workers, is_hub_id, out_of_reach

#: Models that come with the code: each machine has its own copy.
SHIPPED = RECIPES.parent / "demo"


def check_places(recipe: Recipe, stages: Sequence[StageName]) -> None:
    """Raise RecipeError if a work pool cannot reach what its stage needs; nothing is asked.

    Args:
        stages: stages of the run.
    """
    for stage, pool in recipe.place.pools().items():
        if stage not in stages:
            continue
        for setting, place in _places(recipe, stage):
            if (why := _why_not(setting, place, recipe.shared_folders)) is not None:
                raise RecipeError(
                    f"{setting}: workers of pool {pool} (place.{stage}) cannot reach "
                    f"{without_secrets(place)}, {why}"
                )
        if (secret := _secret(hide_secrets(settings_to_send(recipe)))) is not None:
            raise RecipeError(
                f"{secret}: a secret cannot be sent to pool {pool} (place.{stage}), since Prefect "
                "would store it: set credentials in the environment of its workers"
            )


def settings_to_send(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe as JSON, for a run that sends no stage itself.

    It has no secrets of publishing, which stays with the sender. Paths of shipped models are
    relative to the folder of recipes, as in a recipe there.
    """
    settings: dict[str, Any] = recipe.model_dump(mode="json")
    settings["place"] = {}
    settings["publish"] |= {"signing_key": None, "hub": None}
    found: dict[str, Any] = _relative(settings)
    return found


def received_recipe(settings: dict[str, Any]) -> Recipe:
    """The recipe of `settings_to_send`. Raises RecipeError for one that this version refuses."""
    settings = anchored(settings, RECIPES)
    try:
        return Recipe.model_validate(settings)
    except ValidationError as error:
        raise RecipeError(explain("the sent recipe", error, settings)) from None


def _places(recipe: Recipe, stage: StageName) -> Iterator[tuple[str, str]]:
    """(setting, place) of what a sent stage reads, writes or checks."""
    yield "store", recipe.store
    if stage == "download":
        yield from _source_places(recipe.source)
    measuring = recipe.evaluate
    others = [("model.path", recipe.model.path), ("model.vae", recipe.model.vae)]
    others += [("train.denoiser_config", recipe.train.denoiser_config)]
    others += [("evaluate.clip", measuring.clip)]
    others += [("evaluate.image_encoder", measuring.image_encoder)]
    others += [("evaluate.inception", measuring.inception)]
    others += [(f"evaluate.judges.{n}", path) for n, path in measuring.preference_models.items()]
    others += [
        (f"evaluate.prompts.{name}.file", one.file) for name, one in measuring.prompts.items()
    ]
    others += [("publish.registry", recipe.publish.registry)]
    yield from ((setting, place) for setting, place in others if place is not None)


def _source_places(source: Source) -> Iterator[tuple[str, str]]:
    is_on_hub = source.kind == "dataset" and is_hub_id(source.path)
    if source.kind != "digits" and not is_on_hub:  # each machine draws the digits itself
        yield "source.path", source.path
    if source.kind == "urls" and source.base_url is not None:
        yield "source.base_url", source.base_url


def _why_not(setting: str, place: str, shared: Sequence[str]) -> str | None:
    """The reason and the remedy, or None if nothing is known against the place."""
    if "://" not in place:
        if _is_shipped(place) or (_is_model(setting) and is_hub_id(place)):
            return None
        if not Path(place).expanduser().is_absolute():
            return "a path relative to this folder: write a URL (s3://, gs://) or an absolute path"
    return out_of_reach(place, Workers.REMOTE, shared)


def _is_model(setting: str) -> bool:
    section, _, name = setting.partition(".")
    is_file = name == "inception" or name.endswith(".file")
    return section in ("model", "evaluate") and not is_file


def _is_shipped(path: str) -> bool:
    return Path(os.path.abspath(path)).is_relative_to(SHIPPED)


def _relative(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _relative(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_relative(item) for item in value]
    if isinstance(value, str) and value.startswith(f"{SHIPPED}/"):
        return os.path.relpath(value, RECIPES)
    return value


def _secret(value: Any, name: str = "") -> str | None:
    """The dotted name of the first hidden setting; None without one."""
    if isinstance(value, dict | list):
        rows = value.items() if isinstance(value, dict) else enumerate(value)
        inner = (_secret(item, f"{name}.{key}".lstrip(".")) for key, item in rows)
        return next(filter(None, inner), None)
    return name if isinstance(value, SecretStr) else None
