"""Commands on a store: list, show, verify, collect garbage."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

from artifacts.errors import is_full
from artifacts.filesystems import entries, name_of, subfolders
from artifacts.gc import Collector, Garbage, Key, Marks, mark, registries, runs
from artifacts.records import first_fault
from artifacts.store import MANIFEST, Artifact, Store
from configs.errors import Away, Refused
from configs.secrets import one_line, without_secrets
from configs.settings.recipe import Recipe
from tasks import tpu
from tasks.progress import bytes_in_words
from tasks.publish.registry import CANDIDATE, CHAMPION, Registry, Version
from tasks.publish.stage import CHAMPION_EVALUATION, remeasured_champion

log = logging.getLogger("kiln")
NAMED = 5  # artifacts that an error names
LONGEST = 200  # characters of a value that `kiln show` prints
MODEL = "model"  # beside the stages of artifacts
Checked = tuple[str, str, str | None]  # stage and key, or MODEL and its name and version; fault


def check_store(url: str, kind: Literal["store", "registry"] = "store") -> None:
    """Raise Refused for a missing store or registry, or an unsupported URL."""
    store = Store(url)
    if not _is_there(store):
        raise Refused(f"{kind} {without_secrets(url)}: not found")
    if store.is_local and not store.fs.isdir(store.root):
        raise Refused(f"{kind} {without_secrets(url)}: it is a file: name a folder")


def _is_there(store: Store) -> bool:
    """Whether a store exists. s3fs denies that a bucket exists if it is away or forbidden."""
    if store.is_local:
        return bool(store.fs.exists(store.root))
    try:
        store.fs.info(store.root)
    except FileNotFoundError:
        return False
    return True


def list_store(url: str, registry: str | None, *, as_json: bool) -> None:
    """Print artifacts by stage, and published versions with the champion marked."""
    store = Store(url)
    users = _users(store)
    rows = [_row(artifact, users) for artifact in store.artifacts()]
    models = list(_models(store, registry))
    if as_json:
        published = [
            {
                "name": own_registry.name,
                "version": version.name,
                "uri": version.uri,
                "champion": alias == CHAMPION,
                "candidate": alias == CANDIDATE,
            }
            for own_registry, version, alias in models
        ]
        print(json.dumps({"artifacts": rows, "models": published}))
        return
    for row in rows:
        names = [*row["recipes"], *(f"of {model}" for model in row["models"])]
        size = bytes_in_words(row["bytes"])
        print(
            f"{row['stage']:9} {row['key'][:12]}  {row['files']:5} files {size:>9}"
            f"  {row['created']}  {', '.join(names)}".rstrip()
        )
    for own_registry, version, alias in models:
        print(f"model     {own_registry.name} {version.name}  {version.uri}  {alias}".rstrip())
    if not rows and not models:
        print(f"nothing in {url}")


def show_artifact(url: str, what: str, *, as_json: bool) -> None:
    """Print an artifact's settings, lineage and the reason of its build."""
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
    print(f"  state   {'whole: a run reuses it' if fault is None else fault}")
    print("  lineage")
    for depth, name, ancestor in _lineage(store, artifact):
        print(f"    {'  ' * depth}{name} {ancestor}")
    for title in ("settings", "summary"):
        print(f"  {title}")
        for name, value in manifest[title].items():
            print(f"    {name}: {_shortened(json.dumps(value, ensure_ascii=False))}")


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def verify_store(
    url: str, what: str | None, registry: str | None = None, *, as_json: bool = False
) -> bool:
    """Re-hash artifacts and models; print a line for each, and the count; whether all are whole.

    Raises:
        Refused: there is nothing to verify, as in a folder without a store.
    """
    checked = []
    for kind, name, fault in _verify(Store(url), what, registry):
        checked.append({"kind": kind, "name": name, "fault": fault})
        if not as_json:
            print(f"{kind:9} {name if kind == MODEL else name[:12]}  {fault or 'whole'}")
    if not checked:
        raise Refused(f"nothing in {without_secrets(url)}: name the store by --store")
    damaged = sum(entry["fault"] is not None for entry in checked)
    if as_json:
        print(json.dumps({"whole": not damaged, "checked": checked}))
    else:
        print(f"{len(checked)} checked: {f'{damaged} damaged' if damaged else 'all whole'}")
    return not damaged


def _verify(store: Store, what: str | None, url: str | None) -> Iterator[Checked]:
    """Artifacts and, without `what`, published models."""
    damaged = list(_damaged(store, what or ""))
    yield from damaged
    if what and damaged:
        return
    for artifact in [_one(store, what)] if what else store.artifacts():
        fault = _fault(partial(store.fault, artifact, deep=True))
        if fault is None or _is_still_there(store, artifact.path):
            yield artifact.stage, artifact.key, fault
    if what:
        return
    for name, error in _damage(store, url):
        yield MODEL, name, error
    for registry, version, _ in _models(store, url):
        root = f"{registry.root}/{version.name}"
        check = partial(first_fault, registry.fs, root, version.manifest["files"], deep=True)
        fault = _fault(check)
        if fault is None or _is_still_there(registry.store, root):
            yield MODEL, f"{registry.name} {version.name}", fault


def _is_still_there(store: Store, folder: str) -> bool:
    """Whether neither `kiln gc` nor `keep_versions` has deleted what has a fault."""
    return MANIFEST in map(name_of, entries(store.fs, folder))


def _fault(check: Callable[[], str | None]) -> str | None:
    """The fault that a check finds; a file that cannot be read does not end the others' checks."""
    try:
        return check()
    except OSError as error:
        return f"cannot be read: {one_line(error)}"


def collect_garbage(
    url: str,
    registry: str | None = None,
    *,
    days: float,
    hours: float,
    delete: bool,
    as_json: bool = False,
) -> None:
    """List unneeded files that have not changed for `hours`, and delete them with `delete`.

    Raises:
        Refused: `days` or `hours` is negative or no number.
        Refused: there is no store, or the folder has other files alone.
        Refused: a damaged record hides what is needed.
        Away: the disk is too full for the lock of a collection.
    """
    for option, value in (("--days", days), ("--hours", hours)):
        if not value >= 0:  # nor NaN, by which every run would be too old
            raise Refused(f"{option} {value}: give a number from 0 on")
    store = _used_store(url)

    def marked() -> Marks:
        return mark(store, _published(store, registry), days)

    collector = Collector(store, marked, days=days, min_age=hours * 3600)
    items: Iterable[Garbage] = list(collector.garbage())
    garbage: list[dict[str, Any]] = []
    try:
        for item in collector.delete(items) if delete else items:
            facts = {"kind": item.kind, "stage": item.stage, "key": item.key, "bytes": item.size}
            garbage.append(facts)
            if not as_json:
                print(
                    f"{item.kind:11} {item.stage:9} {item.key[:12]}  {bytes_in_words(item.size):>9}"
                )
    except OSError as error:
        if not is_full(error):
            raise
        raise Away(
            f"gc: no space left for its lock in {store.url}: delete any other file there first"
        ) from error
    size = sum(facts["bytes"] for facts in garbage)
    if as_json:
        kept = {"kept": collector.needed, "kept_bytes": collector.kept_bytes}
        limits = {"days": days, "hours": hours, **kept}
        print(json.dumps({"deleted": delete, "bytes": size, "garbage": garbage, **limits}))
        return
    print(
        f"kept: {_count(collector.needed, 'artifact')} that published models or runs of the last "
        f"{days:g} days need, and what changed in the last {hours:g} hours (--days, --hours): "
        f"{bytes_in_words(collector.kept_bytes)} in finished artifacts"
    )
    if not garbage and not delete:
        print("nothing to delete")
        return
    total = f"{_count(len(garbage), 'thing')}, {bytes_in_words(size)}"
    print(f"deleted {total}" if delete else f"{total}, would be deleted (--delete does it)")


def _used_store(url: str) -> Store:
    """A store with a run or an artifact: `*.tmp` of other programs would count as leftovers."""
    check_store(url)
    store = Store(url)
    if next(iter(runs(store)), None) is None and next(iter(store.artifacts()), None) is None:
        raise Refused(
            f"no run and no artifact in {without_secrets(url)}: name the store by --store"
        )
    return store


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _published(store: Store, url: str | None) -> Iterator[dict[str, Any]]:
    """Manifests of every published version. Raises Refused if some may be unknown."""
    for path, recorded in registries(store):
        place = Store(recorded)
        if not entries(place.fs, place.root):
            raise Refused(
                f"registry {recorded} is missing, so nothing is deleted: restore it, or delete its "
                f"record {path}"
            )
    for name, error in _damage(store, url):  # what it was made from is not known
        raise Refused(f"{name}: {error}; nothing is deleted before its repair")
    for _, version, _ in _models(store, url):
        yield version.manifest


def _one(store: Store, what: str) -> Artifact:
    """The artifact whose key or digest begins with `what`. Raises Refused."""
    artifacts = list(store.artifacts())
    matches = [a for a in artifacts if _matches(what, a.stage, a.key, a.digest)]
    for stage, key, error in () if matches else _damaged(store, what):
        raise Refused(f"{stage}/{key[:12]} is damaged: {error}; the next run builds it again")
    if len(matches) > 1:
        names = ", ".join(f"{a.stage}/{a.key[:12]}" for a in matches[:NAMED])
        more = ", …" if len(matches) > NAMED else ""
        raise Refused(f"{what}: several begin with it ({names}{more}): give more characters")
    if not matches:
        for artifact in artifacts:
            for name, digest in artifact.manifest["inputs"].items():
                if digest.startswith(what):
                    place = f"{artifact.stage}/{artifact.key[:12]}"
                    raise Refused(f"{what}: an input of {place} ({name}), and no artifact here")
        raise Refused(
            f"{what}: no model, and no artifact's key or digest begins with it; see `kiln ls`"
        )
    return matches[0]


def _damaged(store: Store, what: str) -> Iterator[tuple[str, str, str]]:
    """(stage, key, fault) of the artifacts whose manifest is damaged."""
    return (damaged for damaged in store.unreadable() if _matches(what, *damaged[:2]))


def _matches(what: str, stage: str, *names: str) -> bool:
    """Whether an artifact's key or digest begins with `what`, which may name the stage before."""
    wanted_stage, _, start = what.rpartition("/")
    return wanted_stage in ("", stage) and any(name.startswith(start) for name in names)


def _registries(store: Store, url: str | None) -> Iterator[Registry]:
    """Every model name in the store's own registry, in `url`, and where its models also are."""
    known = [store.url_of("registry"), *([url] if url else []), *(u for _, u in registries(store))]
    places = {place.url: place for place in map(Store, known)}
    for place in places.values():
        for name in subfolders(place.fs, place.root):
            yield Registry(place.url, name)


def _damage(store: Store, url: str | None) -> Iterator[tuple[str, str]]:
    """(model and version, fault) of unreadable published models."""
    for registry in _registries(store, url):
        for version, error in registry.unreadable():
            yield f"{registry.name} {version}", error
        try:
            registry.champion()
        except Refused as error:
            yield f"{registry.name} champion", str(error)


def _models(store: Store, url: str | None) -> Iterator[tuple[Registry, Version, str]]:
    """Every published version with its registry and its alias, or ""."""
    for registry in _registries(store, url):
        aliases = dict[str, str]()
        try:
            versions = {CANDIDATE: registry.candidate(), CHAMPION: registry.champion()}
            aliases = {v.name: alias for alias, v in versions.items() if v is not None}
        except Refused as error:  # the other versions stay visible
            log.warning("%s", error)
        for version in registry.versions():
            yield registry, version, aliases.get(version.name, "")


def _lineage(store: Store, artifact: Artifact, depth: int = 0) -> Iterator[tuple[int, str, str]]:
    """(depth, name, stage/key) of each input; if the input is no artifact here, its digest."""
    parents: dict[str, Any] = artifact.manifest["run"].get("parents", {})
    for name, digest in sorted(artifact.manifest["inputs"].items()):
        parent = parents.get(name)
        ancestor = store.load(parent["stage"], parent["key"]) if parent else None
        if ancestor is None:
            yield depth, name, digest[:12]
        else:
            yield depth, name, f"{ancestor.stage}/{ancestor.key[:12]}"
            yield from _lineage(store, ancestor, depth + 1)
    if (champion := remeasured_champion(artifact)) is not None:
        yield depth, CHAMPION_EVALUATION, f"{champion.stage}/{champion.key[:12]}"
        yield from _lineage(store, champion, depth + 1)


def _users(store: Store) -> dict[str, dict[Key, set[str]]]:
    """Recipes and drawn models of the runs that used an artifact, as far as records are there."""
    users: dict[str, dict[Key, set[str]]] = {"recipes": {}, "models": {}}
    try:
        for run in runs(store):
            for what, name in (("recipes", run.recipe), ("models", run.model)):
                if name is not None:
                    for key in run.keys:
                        users[what].setdefault(key, set()).add(name)
    except Refused as error:  # the artifacts stay visible
        log.warning("not every recipe is shown: %s", error)
    return users


def _row(artifact: Artifact, users: Mapping[str, Mapping[Key, set[str]]]) -> dict[str, Any]:
    key = (artifact.stage, artifact.key)
    return {
        "stage": artifact.stage,
        "key": artifact.key,
        **{what: sorted(names.get(key, ())) for what, names in users.items()},
        "uri": artifact.uri,
        "files": len(artifact.files),
        "bytes": sum(entry.size for entry in artifact.files),
        "created": artifact.manifest["run"]["created"],
    }


def show_tpu(recipe: Recipe) -> None:
    """Print the commands that create a recipe's slice, train on it and delete it."""
    if recipe.tpu is None:
        raise Refused(f"recipe {recipe.name}: no section `tpu` (see docs/tpu.md)")
    for why, command in tpu.list_commands(recipe.tpu):
        print(f"# {why}\n{shlex.join(command)}")
