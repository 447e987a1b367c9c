"""Garbage collection: delete artifacts that no published model and no recent run needs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from artifacts import lock
from artifacts.commit import write_atomic
from artifacts.store import SHARDS, Artifact, Store

RUNS = "runs"
CHECKPOINTS = "checkpoints"
Key = tuple[str, str]  # (stage, key)


class GarbageUnsure(ValueError):
    """A damaged record hides the needed artifacts; nothing may be deleted until its repair."""


@dataclass(frozen=True)
class Garbage:
    """Deletable files of one artifact or shard."""

    stage: str
    key: str
    what: str  # artifact | unfinished | shard | checkpoints
    paths: list[str]  # files, or folders to delete recursively
    size: int  # bytes


def record_run(store: Store, run: str, facts: dict[str, Any]) -> None:
    """Remember what a run needs (`facts["stages"][name]["key"]`), beside what it did before."""
    path = f"{store.root}/{RUNS}/{run}.json"
    with suppress(FileNotFoundError):
        known = json.loads(store.fs.cat_file(path))
        facts = {**known, **facts, "stages": known["stages"] | facts["stages"]}
    data = json.dumps({**facts, "at": time.time()}, indent=1)
    write_atomic(store.fs, path, data.encode())


def recent_runs(store: Store, days: float) -> Iterator[dict[str, Any]]:
    """Records of runs within the last `days`. Raises GarbageUnsure if one is damaged."""
    oldest = time.time() - days * 86400
    folder = f"{store.root}/{RUNS}"
    for path in store.fs.glob(f"{folder}/*.json") if store.fs.exists(folder) else []:
        try:
            record = json.loads(store.fs.cat_file(path))
            recent = record["at"] >= oldest
            if not all(isinstance(at["key"], str) for at in record["stages"].values()):
                raise TypeError("a key is a string")
        except (AttributeError, KeyError, TypeError, ValueError):
            raise GarbageUnsure(
                f"{path} is damaged: delete it if its run is no longer needed"
            ) from None
        if recent:
            yield record


def needed_by(store: Store, roots: Iterable[Key]) -> dict[Key, Artifact]:
    """The artifacts of `roots` and all their ancestors.

    Raises:
        GarbageUnsure: a manifest is damaged, so its parents are unknown.
    """
    found: dict[Key, Artifact] = {}
    pending = list(roots)
    while pending:
        stage, key = pending.pop()
        if (stage, key) in found:
            continue
        try:
            artifact = store.load(stage, key)
        except ValueError as error:
            raise GarbageUnsure(f"{error}; its parents are unknown: rebuild it first") from None
        if artifact is not None:
            found[stage, key] = artifact
            parents = artifact.manifest["run"].get("parents", {})
            pending += [(p["stage"], p["key"]) for p in parents.values()]
    return found


def garbage(store: Store, keep: dict[Key, Artifact], wanted: Iterable[Key] = ()) -> list[Garbage]:
    """Everything in the store except `keep`, locked artifacts and the unfinished of `wanted`.

    Args:
        keep: the artifacts of `needed_by`.
        wanted: keys of recent runs, which may resume their unfinished artifacts.
    """
    unfinished = set(wanted) - keep.keys()
    shards = {
        f"{a.store.root}/{a.stage}/{entry.path[3:]}"
        for a in keep.values()
        for entry in a.files
        if entry.path.startswith("../")
    }
    found: list[Garbage] = []
    for stage in _folders(store, store.root):
        busy = False
        for key in _folders(store, f"{store.root}/{stage}"):
            path = f"{store.root}/{stage}/{key}"
            if len(key) != 64:
                continue
            if (stage, key) in unfinished or _is_held(store, f"{path}/lock.json"):
                busy = True
                continue
            if (stage, key) in keep:
                if store.fs.exists(f"{path}/{CHECKPOINTS}"):
                    found.append(_checkpoints(store, stage, key, f"{path}/{CHECKPOINTS}"))
                continue
            done = store.fs.exists(f"{path}/manifest.json")
            what = "artifact" if done else "unfinished"
            found.append(Garbage(stage, key, what, [path], int(store.fs.du(path))))
        if not busy:  # an active builder may be about to reference any shard of its stage
            found += _shard_garbage(store, stage, shards)
    return found


def delete(store: Store, items: Iterable[Garbage]) -> None:
    """Delete items, except those that a builder has locked since the listing.

    The manifest or record is deleted first, so an interrupted deletion leaves no damaged artifact.
    """
    busy: dict[str, bool] = {}  # by stage
    for item in items:
        # A builder may have started since the listing: of this artifact, or of one with the shard.
        if item.what == "shard":
            if item.stage not in busy:
                busy[item.stage] = _is_building(store, item.stage)
            held = busy[item.stage]
        else:
            held = _is_held(store, f"{store.root}/{item.stage}/{item.key}/lock.json")
        if held:
            continue
        for path in item.paths:
            if item.what == "artifact" and store.fs.exists(f"{path}/manifest.json"):
                store.fs.rm_file(f"{path}/manifest.json")
            store.fs.rm(path, recursive=True)


def _checkpoints(store: Store, stage: str, key: str, path: str) -> Garbage:
    """Checkpoints of a finished training run, useful only if its result is damaged."""
    return Garbage(stage, key, "checkpoints", [path], int(store.fs.du(path)))


def _shard_garbage(store: Store, stage: str, keep: set[str]) -> Iterator[Garbage]:
    folder = store.shards_path(stage)
    if not store.fs.exists(folder):
        return
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in store.fs.ls(folder, detail=True):
        name = entry["name"].rpartition("/")[2]
        groups.setdefault(name.partition(".")[0], []).append(entry)
    for key, entries in sorted(groups.items()):
        paths = [e["name"] for e in entries]
        if not any(_same(p, keep) for p in paths):
            records_first = sorted(paths, key=lambda p: not p.endswith(f"/{key}.json"))
            size = sum(int(e["size"] or 0) for e in entries)
            yield Garbage(stage, key, "shard", records_first, size)


def _same(path: str, keep: set[str]) -> bool:
    return path in keep or f"/{path.lstrip('/')}" in keep


def _is_building(store: Store, stage: str) -> bool:
    folder = f"{store.root}/{stage}"
    return any(_is_held(store, f"{folder}/{key}/lock.json") for key in _folders(store, folder))


def _is_held(store: Store, path: str) -> bool:
    owner = lock.read_owner(store.fs, path)
    return owner is not None and not lock.is_dead(owner)


def _folders(store: Store, path: str) -> list[str]:
    if not store.fs.exists(path):
        return []
    entries = store.fs.ls(path, detail=True)
    names = [e["name"].rstrip("/").rpartition("/")[2] for e in entries if e["type"] == "directory"]
    return sorted(n for n in names if n not in (SHARDS, RUNS, "registry"))
