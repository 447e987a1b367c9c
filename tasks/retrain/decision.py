"""The decision of a retraining, an artifact: the same data is not tried twice from one champion."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from artifacts.store import Draft, KeyParts, Store
from configs.settings.recipe import Recipe
from tasks import download, train
from tasks.encode import latent_keys as encode
from tasks.evaluate import stage as evaluate
from tasks.publish import stage as publish
from tasks.retrain.champion import Champion
from tasks.retrain.select_new_and_replayed import SELECTION
from tasks.retrain.source_changes import Changes

STAGE = "retrain"
VERSION = 1
FILE = "decision.json"


def key_parts(
    recipe: Recipe, changes: Changes, champion: Champion | None, models: Mapping[str, str]
) -> KeyParts:
    """The key: source, champion, and all settings, models and versions that affect the verdict.

    Args:
        models: name -> sha256 of the base, the VAE and the models that measure pictures.
    """
    stages = {"download": download, "encode": encode, "train": train}
    stages |= {"evaluate": evaluate, "publish": publish}
    settings = {name: module.settings_for_key(recipe) for name, module in stages.items()}
    settings["retrain"] = recipe.retrain.model_dump(mode="json")
    # A release that trains, measures or judges otherwise may decide otherwise.
    versions = {name: module.VERSION for name, module in stages.items()}
    settings["versions"] = versions | {"retrain": SELECTION}
    inputs = {"source": changes.source, "champion": "" if champion is None else champion.digest}
    inputs |= models
    return KeyParts(STAGE, VERSION, settings, inputs)


def why_unchanged(
    recipe: Recipe,
    store: Store,
    changes: Changes,
    champion: Champion | None,
    models: Mapping[str, str],
) -> str | None:
    """One sentence why there is nothing to train; None if there is.

    Args:
        models: see key_parts.
    """
    if champion is not None and changes.new_rows < recipe.retrain.min_new_rows:
        return _few(changes, champion, recipe.retrain.min_new_rows)
    artifact = store.find(STAGE, key_parts(recipe, changes, champion, models).key)
    if artifact is None:
        return None
    found = artifact.summary
    if found["status"] == "rejected":
        before = "the base" if champion is None else champion.version
        return f"the gate rejected a model of these {changes.rows:,} rows and {before} before"
    if champion is None:  # its registry was deleted
        return None
    version, now = found["version"], champion.version
    return f"{version} of these rows was published before, and {now} is champion again"


def _few(changes: Changes, champion: Champion, least: int) -> str:
    rows = f"{changes.new_rows:,} new rows" if changes.new_rows else "no new rows"
    enough = f", fewer than {least:,}" if changes.new_rows else ""
    removed = f"; {changes.removed_rows:,} rows were removed" if changes.removed_rows else ""
    return f"the source has {rows} since {champion.version}{enough}{removed}"


def build(changes: Changes, report: dict[str, Any], draft: Draft) -> dict[str, Any]:
    """Write the report of a retraining; returns the summary."""
    draft.write(FILE, json.dumps(report, indent=1).encode())
    model = report["model"]
    return {
        "status": report["status"],
        "version": None if model is None else model.rpartition("/")[2],
        "changes": asdict(changes),
    }
