"""Find and delete what no published model and no recent run needs."""

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
    """Something damaged hides what is needed; nothing is deleted until it is mended."""


@dataclass(frozen=True)
class Garbage:
    """Something that may go: a folder or a set of files of one artifact or shard."""

    stage: str
    key: str
    what: str  # artifact | unfinished | shard | checkpoints
    paths: list[str]
    size: int


def record_run(store: Store, run: str, facts: dict[str, Any]) -> None:
    """Remember what a run needs (`facts["stages"][name]["key"]`), beside what it did before."""
    path = f"{store.root}/{RUNS}/{run}.json"
    with suppress(FileNotFoundError):
        known = json.loads(store.fs.cat_file(path))
        facts = {**known, **facts, "stages": known["stages"] | facts["stages"]}
    data = json.dumps({**facts, "at": time.time()}, indent=1)
    write_atomic(store.fs, path, data.encode())


def recent_runs(store: Store, days: float) -> Iterator[dict[str, Any]]:
    """Records of runs within the last `days`."""
    oldest = time.time() - days * 86400
    folder = f"{store.root}/{RUNS}"
    for path in store.fs.glob(f"{folder}/*.json") if store.fs.exists(folder) else []:
        try:
            record = json.loads(store.fs.cat_file(path))
            recent = record["at"] >= oldest
            if not all(isinstance(at["key"], str) for at in record["stages"].values()):
                raise TypeError("a key is text")
        except (AttributeError, KeyError, TypeError, ValueError):
            raise GarbageUnsure(
                f"{path} is damaged: delete it if that run matters no more"
            ) from None
        if recent:
            yield record


def needed_by(store: Store, roots: Iterable[Key]) -> dict[Key, Artifact]:
    """The artifacts of `roots` and all they were made from."""
    found: dict[Key, Artifact] = {}
    waiting = list(roots)
    while waiting:
        stage, key = waiting.pop()
        if (stage, key) in found:
            continue
        try:
            artifact = store.load(stage, key)
        except ValueError as error:
            raise GarbageUnsure(
                f"{error}; what it was made from is not known: rebuild it first"
            ) from None
        if artifact is not None:
            found[stage, key] = artifact
            parents = artifact.manifest["run"].get("parents", {})
            waiting += [(p["stage"], p["key"]) for p in parents.values()]
    return found


def garbage(store: Store, keep: dict[Key, Artifact], wanted: Iterable[Key] = ()) -> list[Garbage]:
    """What is in the store and not kept.

    Whatever a living builder holds the lock of stays, and so do the unfinished ones of `wanted`:
    recent runs will go on with them.
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
        if not busy:  # a living builder may be about to name any shard of its stage
            found += _shard_garbage(store, stage, shards)
    return found


def delete(store: Store, items: Iterable[Garbage]) -> None:
    """Delete; the file that makes a thing exist goes first, so that none is ever half there."""
    busy: dict[str, bool] = {}  # by stage
    for item in items:
        # Somebody may have begun to build it since it was listed, or what will name a shard.
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
    """Checkpoints of training that has finished: only a damaged result would need them again."""
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
    if owner is None or lock.is_dead(owner):
        return False
    try:
        modified = store.fs.modified(path).timestamp()
    except FileNotFoundError:
        return False
    return bool(time.time() - modified < 2 * lock.EXPIRY_SECONDS)


def _folders(store: Store, path: str) -> list[str]:
    if not store.fs.exists(path):
        return []
    entries = store.fs.ls(path, detail=True)
    names = [e["name"].rstrip("/").rpartition("/")[2] for e in entries if e["type"] == "directory"]
    return sorted(n for n in names if n not in (SHARDS, RUNS, "registry"))
