"""The reason why a stage is built again: what differs from the most similar recent artifact."""

from __future__ import annotations

import json
from datetime import datetime
from functools import partial
from typing import Any

from artifacts.filesystems import subfolders
from artifacts.remote_stores import ask_at_once
from artifacts.store import MANIFEST, SHARDS, Artifact, KeyParts, Store

#: Artifacts of a stage that are compared, the newest first: a store may have several recipes.
RECENT = 20
#: Changes that a reason names.
SHOWN = 6


def why_built(store: Store, parts: KeyParts) -> str:
    """The reason of a build: how its key differs from the most similar one of the stage.

    Of the RECENT newest artifacts, that with the fewest changes counts, or of several the newest.
    It may be of another recipe (`kiln ls` has the recipes of each key).
    """
    folder = f"{store.root}/{parts.stage}"
    try:
        if store.fs.exists(f"{folder}/{parts.key}/manifest.json"):
            return "it was damaged"
        recent = _recent_keys(store, parts.stage)
        if not recent:
            return "none was built before"
        found = list(ask_at_once(store.fs, partial(_readable, store, parts.stage), recent))
    except OSError:
        found = []
    given = parts.as_dict()
    changed = [
        (one.key, _changes(_flat({name: one.manifest[name] for name in given}), _flat(given)))
        for one in found
        if one is not None
    ]
    if not changed:
        return "the artifacts before could not be read"
    key, fewest = min(changed, key=lambda pair: len(pair[1]))
    changes = ", ".join([*fewest[:SHOWN], *["…"][: len(fewest) > SHOWN]])
    return f"changed since {key[:12]}: {changes}"


def _readable(store: Store, stage: str, key: str) -> Artifact | None:
    try:
        return store.load(stage, key, with_files=False)
    except ValueError:  # damaged
        return None


def _recent_keys(store: Store, stage: str) -> list[str]:
    """Keys of the RECENT artifacts of a stage that were committed last, the newest first."""
    folder = f"{store.root}/{stage}"

    def committed(key: str) -> tuple[datetime, str] | None:
        try:
            return store.fs.modified(f"{folder}/{key}/{MANIFEST}"), key
        except FileNotFoundError:
            return None

    keys = (key for key in subfolders(store.fs, folder) if key != SHARDS)
    found = sorted(filter(None, ask_at_once(store.fs, committed, keys)), reverse=True)
    return [key for _, key in found[:RECENT]]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Dotted name -> value."""
    if not isinstance(value, dict):
        return {name: value}
    parts = (_flat(inner, f"{name}.{key}".lstrip(".")) for key, inner in value.items())
    return {key: inner for part in parts for key, inner in part.items()}


def _changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    names = sorted(n for n in old.keys() | new.keys() if old.get(n) != new.get(n))
    changes = ((name, old.get(name), new.get(name)) for name in names)
    return [
        name
        if isinstance(before, str | list) or isinstance(after, str | list)
        else f"{name} {json.dumps(before)} → {json.dumps(after)}"
        for name, before, after in changes
    ]
