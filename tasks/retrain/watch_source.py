"""Notice changes of a source by the stamps of its files, without reading them."""

from __future__ import annotations

import json
from typing import Any

from fsspec.core import url_to_fs

from artifacts.compare_and_swap import read, swap
from artifacts.digests import digest_json
from configs.recipe import Recipe
from tasks.download.parquet_csv_jsonl import reading
from tasks.download.row_hash_cache import CHANGE_MARKERS
from tasks.download.sources import SOURCES
from tasks.publish.stage import registry_of

EVENT = "kiln.source.changed"
FILE = "watched.json"  # in the model's folder of the registry


def resource_of(model: str) -> str:
    """The Prefect resource of the source of a model, by its name in the registry."""
    return f"kiln.source.{model}"


def stamp(recipe: Recipe) -> str:
    """sha256 (hex) over the source's settings, and name, size and etag or time of its files.

    Raises SourceError if the files cannot be listed.
    """
    files = SOURCES[recipe.source.kind](recipe.source).files()
    return digest_json([recipe.source.model_dump(mode="json"), [_marks(file) for file in files]])


def last_stamp(recipe: Recipe) -> str | None:
    """The stamp of the last `remember`; None without one."""
    registry = registry_of(recipe)
    data = read(registry.fs, f"{registry.root}/{FILE}").data
    return None if data is None else str(json.loads(data)["stamp"])


def remember(recipe: Recipe, found: str) -> None:
    """Store a stamp."""
    registry = registry_of(recipe)
    path, data = f"{registry.root}/{FILE}", json.dumps({"stamp": found}).encode()
    registry.fs.makedirs(registry.root, exist_ok=True)
    while not swap(registry.fs, path, read(registry.fs, path), data):
        pass  # another watcher stored its stamp at this moment


def _marks(file: str) -> dict[str, Any]:
    with reading(file):
        fs, name = url_to_fs(file)
        fs.invalidate_cache()
        info = fs.info(name)
    marks = {mark: str(info[mark]) for mark in CHANGE_MARKERS if info.get(mark) is not None}
    return {"file": file, "size": info.get("size"), **marks}
