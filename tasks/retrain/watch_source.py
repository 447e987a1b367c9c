"""Notice changes of a source by the stamps of its files, without reading them."""

from __future__ import annotations

import json

from artifacts.compare_and_swap import read, swap
from artifacts.lock import is_alive
from artifacts.records import digest_json, parse_json
from artifacts.remote_stores import make_folder_of
from configs.settings.recipe import Recipe
from tasks.download.sources import SOURCES
from tasks.publish.stage import registry_of

EVENT = "kiln.source.changed"
FILE = "watched.json"  # in the model's folder of the registry
LOCK = "retrain-lock.json"


def source_resource(model: str) -> str:
    """The Prefect resource of the source of a model, by its name in the registry."""
    return f"kiln.source.{model}"


def stamp(recipe: Recipe) -> str:
    """sha256 (hex) over the source's settings, and name, size and etag or time of its files.

    Raises SourceError if the files cannot be listed.
    """
    pieces = SOURCES[recipe.source.kind](recipe.source).pieces()
    identities = [piece.identity for piece in pieces]
    return digest_json([recipe.source.model_dump(mode="json"), identities])


def lock_path(recipe: Recipe) -> str:
    """The lock of a model's retrainings; a retraining reads its source under it."""
    return f"{registry_of(recipe).root}/{LOCK}"


def is_retraining(recipe: Recipe) -> bool:
    """Whether a retraining of the model runs.

    One that begins later reads the source after the stamp of this call's process.
    """
    return is_alive(registry_of(recipe).fs, lock_path(recipe))


def last_stamp(recipe: Recipe) -> str | None:
    """The stamp of the last `remember`; None without one, or if it is damaged."""
    registry = registry_of(recipe)
    data = read(registry.fs, f"{registry.root}/{FILE}").data
    try:
        return None if data is None else str(parse_json(data)["stamp"])
    except (KeyError, TypeError, ValueError):
        return None


def remember(recipe: Recipe, found: str) -> None:
    """Store a stamp. Raises OSError if the registry cannot be written."""
    registry = registry_of(recipe)
    path, data = f"{registry.root}/{FILE}", json.dumps({"stamp": found}).encode()
    make_folder_of(registry.fs, path)
    while not swap(registry.fs, path, read(registry.fs, path), data):
        pass  # another watcher stored its stamp at this moment


def forget(recipe: Recipe) -> None:
    """Let the next watch announce the source again, if one has announced it.

    Raises OSError if the registry cannot be written.
    """
    if last_stamp(recipe) is not None:
        remember(recipe, "")
