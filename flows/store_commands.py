"""Look at a store: list, show, verify, collect garbage."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator
from typing import Any

from artifacts import gc
from artifacts.commit import first_fault
from artifacts.store import Artifact, Store
from configs.load import RecipeError
from configs.schema import Recipe
from configs.urls import without_secrets
from tasks.publish.model_registry import Registry, RegistryError, Version
from tasks.tpu import launch

log = logging.getLogger("kiln")


class NotInStore(ValueError):
    """No artifact, or more than one, goes by what was asked for."""


class StoreNotThere(ValueError):
    """There is nothing where a store was looked for."""


def check_store(url: str) -> None:
    """Raise StoreNotThere, or a StoreError for a URL that cannot be one."""
    store = Store(url)
    if not store.fs.exists(store.root):
        raise StoreNotThere(f"store {without_secrets(url)}: not there")


def list_store(url: str, registry: str | None = None, *, as_json: bool) -> None:
    """Print artifacts by stage, and published versions with the champion marked."""
    store = Store(url)
    rows = [_row(artifact) for artifact in store.artifacts()]
    models = list(_models(store, registry))
    if as_json:
        print(json.dumps({"artifacts": rows, "models": [_model_row(*m) for m in models]}))
        return
    for row in rows:
        print(
            f"{row['stage']:9} {row['key'][:12]}  {row['files']:5} files {_size(row['bytes']):>9}"
            f"  {row['created']}"
        )
    for found, version, champion in models:
        mark = "  champion" if champion else ""
        print(f"model     {found.name} {version.name}  {version.uri}{mark}")
    if not rows and not models:
        print(f"nothing in {url}")


def show_artifact(url: str, what: str, *, as_json: bool) -> None:
    """Print one artifact's settings, lineage and the reason it was built."""
    store = Store(url)
    artifact = _one(store, what)
    manifest = artifact.manifest
    facts = {k: manifest[k] for k in ("stage", "version", "key", "digest", "settings", "inputs")}
    facts |= {"uri": artifact.uri, "summary": manifest["summary"], "run": manifest["run"]}
    if as_json:
        print(json.dumps(facts))
        return
    run = manifest["run"]
    print(f"{artifact.stage} {artifact.key}\n  at      {artifact.uri}")
    print(f"  digest  {artifact.digest}")
    print(f"  built   {run['created']} on {run['host']} in {run['seconds']:.1f} s: {run['reason']}")
    fault = store.fault(artifact)
    print(f"  state   {'whole: it will be reused' if fault is None else fault}")
    print("  lineage")
    for depth, name, key in _lineage(store, artifact):
        print(f"    {'  ' * depth}{name} {key[:16]}")
    for title in ("settings", "summary"):
        print(f"  {title}")
        for name, value in manifest[title].items():
            print(f"    {name}: {json.dumps(value, ensure_ascii=False)[:200]}")


def verify_store(url: str, what: str | None, registry: str | None = None) -> bool:
    """Re-hash and print; whether everything is whole."""
    store = Store(url)
    whole = True
    damaged = [found for found in store.unreadable() if _goes_by(what or "", *found[:2])]
    for stage, key, error in damaged:
        print(f"{stage:9} {key[:12]}  {error}")
        whole = False
    if what and damaged:
        return whole
    for artifact in [_one(store, what)] if what else store.artifacts():
        fault = store.fault(artifact, deep=True)
        print(f"{artifact.stage:9} {artifact.key[:12]}  {fault or 'whole'}")
        whole &= fault is None
    for name, error in [] if what else _damage(store, registry):
        print(f"model     {name}  {error}")
        whole = False
    for found, version, _ in [] if what else _models(store, registry):
        root = f"{found.root}/{version.name}"
        fault = first_fault(found.fs, root, version.manifest["files"], deep=True)
        print(f"model     {found.name} {version.name}  {fault or 'whole'}")
        whole &= fault is None
    return whole


def collect_garbage(url: str, registry: str | None = None, *, days: float, delete: bool) -> None:
    """List what nothing needs, and delete it if asked."""
    store = Store(url)
    roots = [
        (stage, found["key"])
        for run in gc.recent_runs(store, days)
        for stage, found in run["stages"].items()
    ]
    wanted = list(roots)
    for name, error in _damage(store, registry):  # what it was made from is not known
        raise gc.GarbageUnsure(f"{name}: {error}; nothing is deleted before that is mended")
    roots += [("publish", version.manifest["key"]) for _, version, _ in _models(store, registry)]
    items = gc.garbage(store, gc.needed_by(store, roots), wanted)
    for item in items:
        print(f"{item.what:11} {item.stage:9} {item.key[:12]}  {_size(item.size):>9}")
    total = _size(sum(item.size for item in items))
    if delete:
        gc.delete(store, items)
        print(f"deleted {len(items)} things, {total}")
    else:
        print(f"{len(items)} things, {total}, would be deleted (--delete does it)")


def _one(store: Store, what: str) -> Artifact:
    found = [a for a in store.artifacts() if _goes_by(what, a.stage, a.key)]
    if len(found) != 1:
        names = ", ".join(f"{a.stage}/{a.key[:12]}" for a in found) or "nothing"
        raise NotInStore(f"{what}: {names} goes by that; see `kiln ls`")
    return found[0]


def _goes_by(what: str, stage: str, key: str) -> bool:
    wanted_stage, _, start = what.rpartition("/")
    return key.startswith(start) and wanted_stage in ("", stage)


def _registries(store: Store, url: str | None) -> Iterator[Registry]:
    url = url or store.url_of("registry")
    place = Store(url)
    if not place.fs.exists(place.root):
        return
    for entry in sorted(place.fs.ls(place.root, detail=False)):
        yield Registry(url, entry.rstrip("/").rpartition("/")[2])


def _damage(store: Store, url: str | None) -> Iterator[tuple[str, str]]:
    """(model and version, what is wrong) of what is published and cannot be read."""
    for registry in _registries(store, url):
        for version, error in registry.unreadable():
            yield f"{registry.name} {version}", error
        try:
            registry.champion()
        except RegistryError as error:
            yield f"{registry.name} champion", str(error)


def _models(store: Store, url: str | None) -> Iterator[tuple[Registry, Version, bool]]:
    for registry in _registries(store, url):
        try:
            champion = registry.champion()
        except RegistryError as error:  # a damaged champion hides none of the others
            log.warning("%s", error)
            champion = None
        for version in registry.versions():
            yield registry, version, champion is not None and champion.name == version.name


def _lineage(store: Store, artifact: Artifact, depth: int = 0) -> Iterator[tuple[int, str, str]]:
    parents: dict[str, Any] = artifact.manifest["run"].get("parents", {})
    for name, digest in sorted(artifact.manifest["inputs"].items()):
        yield depth, name, digest
        parent = parents.get(name)
        found = store.load(parent["stage"], parent["key"]) if parent else None
        if found is not None:
            yield from _lineage(store, found, depth + 1)


def _row(artifact: Artifact) -> dict[str, Any]:
    return {
        "stage": artifact.stage,
        "key": artifact.key,
        "uri": artifact.uri,
        "files": len(artifact.files),
        "bytes": sum(entry.size for entry in artifact.files),
        "created": artifact.manifest["run"]["created"],
    }


def _model_row(registry: Registry, version: Version, champion: bool) -> dict[str, Any]:
    return {
        "name": registry.name,
        "version": version.name,
        "uri": version.uri,
        "champion": champion,
    }


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def show_tpu(recipe: Recipe) -> None:
    """Print the commands that make a recipe's slice, train on it and delete it."""
    if recipe.tpu is None:
        raise RecipeError(f"recipe {recipe.name}: it has no section `tpu` (see docs/tpu.md)")
    for why, command in launch.list_commands(recipe.tpu):
        print(f"# {why}\n{shlex.join(command)}")
