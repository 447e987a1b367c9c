"""The reason why a stage is built again: what changed since its newest artifact."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from artifacts.artifact_key import KeyParts
from artifacts.concurrent_requests import ask_at_once
from artifacts.list_folder import subfolders
from artifacts.store import MANIFEST, SHARDS, Store


def why_built(store: Store, parts: KeyParts) -> str:
    """The reason of a build: how the key differs from that of the newest artifact of the stage."""
    folder = f"{store.root}/{parts.stage}"
    try:
        if store.fs.exists(f"{folder}/{parts.key}/manifest.json"):
            return "it was damaged"
        newest = _newest_key(store, parts.stage)
        if newest is None:
            return "none was built before"
        found = store.load(parts.stage, newest, with_files=False)
    except (OSError, ValueError):
        found = None
    if found is None:
        return "the newest artifact could not be read"
    new = _flat(parts.as_dict())
    old = {name: found.manifest[name] for name in parts.as_dict()}
    return "changed: " + ", ".join(_changes(_flat(old), new)[:6])


def _newest_key(store: Store, stage: str) -> str | None:
    """Key of the artifact of a stage that was committed last."""
    folder = f"{store.root}/{stage}"

    def committed(key: str) -> tuple[datetime, str] | None:
        try:
            return store.fs.modified(f"{folder}/{key}/{MANIFEST}"), key
        except FileNotFoundError:
            return None

    keys = (key for key in subfolders(store.fs, folder) if key != SHARDS)
    found = filter(None, ask_at_once(store.fs, committed, keys))
    return max(found, default=(None, None))[1]


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
        else f"{name} {before} → {after}"
        for name, before, after in changes
    ]
