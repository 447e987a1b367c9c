"""Commands on a store and on its published models: list, show, verify, collect garbage, sign, push.

`show_model` prints a version's metrics beside its base's and the champion's, from the registry.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from artifacts.errors import is_full
from artifacts.filesystems import entries, name_of
from artifacts.gc import Collector, Garbage, Key, Marks, mark, registries, runs
from artifacts.models import resolve_model
from artifacts.records import read_checked
from artifacts.store import MANIFEST, Artifact, Store
from configs.errors import Away, Refused
from configs.secrets import one_line, without_secrets
from tasks.build_or_reuse import METRICS
from tasks.evaluate.distances import Metric, differences
from tasks.evaluate.metrics import metric_rows
from tasks.evaluate.published import published_estimates
from tasks.panels import aligned
from tasks.progress import bytes_in_words
from tasks.publish.champion_alias import CANDIDATE, CHAMPION
from tasks.publish.hub import SIGNATURE, push, sign_version, verify_folder
from tasks.publish.registry import Registry, Version, model_names
from tasks.publish.stage import CHAMPION_EVALUATION, remeasured_champion

log = logging.getLogger("kiln")
NAMED = 5  # artifacts that an error names
LONGEST = 200  # characters of a value that `kiln show` prints
MODEL = "model"  # beside the stages of artifacts


def check_store(url: str, kind: Literal["store", "registry"] = "store") -> None:
    """Raise Refused for a missing store or registry, or an unsupported URL."""
    store = Store(url)
    try:
        # s3fs denies that a bucket exists if it is away or forbidden.
        is_there = store.fs.exists(store.root) if store.is_local else store.fs.info(store.root)
    except FileNotFoundError:
        is_there = False
    if not is_there:
        raise Refused(f"{kind} {without_secrets(url)}: not found")
    if store.is_local and not store.fs.isdir(store.root):
        raise Refused(f"{kind} {without_secrets(url)}: it is a file: name a folder")


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
            text = json.dumps(value, ensure_ascii=False)
            print(f"    {name}: {text if len(text) <= LONGEST else text[: LONGEST - 1] + '…'}")


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


def _verify(
    store: Store, what: str | None, url: str | None
) -> Iterator[tuple[str, str, str | None]]:
    """(stage, key, fault) of artifacts; without `what`, (MODEL, name and version, fault), too."""
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
        fault = _fault(partial(registry.fault, version))
        if fault is None or _is_still_there(registry.store, f"{registry.root}/{version.name}"):
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
        return mark(store, _manifests(store, registry), days)

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


def _manifests(store: Store, url: str | None) -> Iterator[dict[str, Any]]:
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
            f"{what}: no model, and no artifact's key or digest begins with it; see `kiln ls`, or "
            "for a picture add --recipe RECIPE"
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
        for name in model_names(place):
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


def find_version(url: str, model: str) -> tuple[Registry, Version]:
    """The registry and version of `name`, its champion, `name@v2` or `name@candidate`.

    Raises:
        Refused: it does not exist.
    """
    name, _, which = model.partition("@")
    registry = Registry(url, name)
    return registry, registry.find(which)


def is_published(url: str, what: str) -> bool:
    """Whether a word names a model of the registry, and not an artifact's key."""
    return "@" in what or what in _names(url)


def _names(url: str) -> list[str]:
    return model_names(Store(url))


def push_model(url: str, model: str, repo: str, *, private: bool) -> None:
    """Push a version to the hub and print the commit's URL. Raises Refused for a wrong id."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise Refused(f"push: {one_line(error)}") from None
    registry, version = find_version(url, model)
    print(push(registry, version, repo, private=private))


def sign_model(url: str, model: str, key: str) -> None:
    """Sign a version."""
    registry, version = find_version(url, model)
    sign_version(registry, version, key)
    print(f"{registry.name} {version.name}: signed ({version.uri}/{SIGNATURE})")


def verify_model(url: str, model: str, key: Path | None, *, as_json: bool = False) -> bool:
    """Check the manifest of a version and, with a key, the signature; print the result.

    Args:
        model: name in the registry, as of `find_version`, or a folder, which requires a key. A
            folder of a model's name is `./name`.

    Raises:
        Refused: the signature is missing or wrong.
    """
    folder = Path(model)
    checked: list[dict[str, Any]] = []
    is_folder = folder.is_dir() and model.partition("@")[0] not in _names(url)
    if is_folder and key is None:
        raise Refused(f"{folder}: a folder is verified against a public key: add --key")
    if not is_folder:
        registry, version = find_version(url, model)
        fault = registry.fault(version)
        name = f"{registry.name} {version.name}"
        checked.append({"kind": "model", "name": name, "fault": fault})
        if not as_json:
            print(f"model     {name}  {fault or 'whole'}")
        folder = folder if fault or key is None else resolve_model(version.uri)
    whole = all(entry["fault"] is None for entry in checked)
    if whole and key is not None:
        verify_folder(folder, key)
    signed_by = str(key) if whole and key is not None else None
    if as_json:
        print(json.dumps({"whole": whole, "checked": checked, "signed_by": signed_by}))
    elif signed_by is not None:
        print(f"signed by the owner of {signed_by}")
    return whole


def show_history(url: str, name: str, *, as_json: bool = False) -> None:
    """Print every change of the champion and every candidate, oldest first.

    Raises Refused without one.
    """
    history = Registry(url, name).history()
    if not history.versions:
        known = ", ".join(_names(url)) or "none"
        raise Refused(f"{name}: there is no champion (the registry's models are: {known})")
    if as_json:
        moves = [_parts(move, "version", "why", "at", "by") for move in history.moves]
        candidates = [
            _parts(candidate, "version", "champion", "at", "until", "forced")
            | {"rejected": _parts(candidate.get("rejected", {}), "by", "why", "at")}
            | {"outcome": history.outcome(candidate)}
            for candidate in history.candidates
        ]
        shown = {"champion": history.champion, "history": moves, "candidates": candidates}
        print(json.dumps({"name": name, **shown}))
        return
    lines = list[tuple[str, str, str]]()
    for candidate in history.candidates:
        forced = f", forced: {candidate['forced']}" if candidate.get("forced") else ""
        until = f"candidate until {candidate['until']}"
        lines.append((candidate["at"], candidate["version"], f"{until}{forced}"))
    rejected = [(c["version"], c["rejected"]) for c in history.candidates if "rejected" in c]
    lines += [(r["at"], v, f"rejected: {r['why']} (by {r['by']})") for v, r in rejected]
    for move in history.moves:
        by = f" (by {move['by']})" if "by" in move else ""
        lines.append((move["at"], move["version"], f"{move['why']}{by}"))
    for at, version, why in sorted(lines, key=lambda line: line[0]):
        print(f"{at}  {version:5} {why}")
    if history.waiting is not None:
        version = history.waiting["version"]
        print(f"{version} awaits approval: kiln promote {name} {version}")


def _parts(entry: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: entry[name] for name in names if name in entry}


def show_model(url: str, model: str, *, as_json: bool) -> None:
    """Print a version with its metrics, and the champion's if that is another version.

    Args:
        model: as of `find_version`.

    Raises:
        Refused: the version does not exist, or the champion is damaged.
        Damaged: metrics are not those that were published.
    """
    registry, version = find_version(url, model)
    champion = registry.champion()
    facts = {
        "name": registry.name,
        "version": version.name,
        "uri": version.uri,
        "digest": version.manifest["digest"],
        "created": version.manifest["run"]["created"],
        "champion": None if champion is None else champion.name,
        "versions": [version.name for version in registry.versions()],
        **_compared(registry, version, champion),
    }
    if as_json:
        print(json.dumps(facts))
        return
    print(f"model {registry.name} {version.name}\n  at        {version.uri}")
    print(f"  digest    {facts['digest']}\n  built     {facts['created']}")
    print(f"  champion  {facts['champion'] or 'none'}\n  versions  {', '.join(facts['versions'])}")
    for line in aligned(_rows(facts)):
        print(f"  {line}")
    if missing := facts["unmeasured"]:
        print(f"  {' and '.join(missing)}: no measurements, since no metrics were published")
    elif not facts["comparable"]:
        print(f"  {facts['champion']} was measured with other prompts, pictures or settings")


def _compared(registry: Registry, version: Version, champion: Version | None) -> dict[str, Any]:
    """`metrics` and `differences` as in metrics.json.

    `comparable` is whether the champion is, and `unmeasured` has the versions without metrics.
    """
    own = _metrics_file(registry, version)
    unmeasured = [] if own["metrics"] else [version.name]
    numbers = dict[str, Metric]()
    compared = dict[str, Metric]()
    comparable = True
    if champion is not None and champion.name != version.name:
        theirs = _metrics_file(registry, champion)
        unmeasured += [] if theirs["metrics"] else [champion.name]
        numbers = _of(theirs["metrics"], "tuned")
        if own["fingerprint"] == theirs["fingerprint"]:
            pair = (published_estimates(v.uri, own["fingerprint"]) for v in (version, champion))
            compared = differences(*(estimates or {} for estimates in pair))
        elif version.manifest["summary"].get("compared_with") == champion.name:
            # The version's gate has measured this champion again, as it measured the version.
            numbers, compared = (_of(own[what], "champion") for what in ("metrics", "differences"))
        comparable = bool(compared)
    models = {model: _of(own["metrics"], model) for model in ("base", "tuned")}
    others = {"base": _of(own["differences"], "base"), "champion": compared}
    return {
        "metrics": _by_name(own["metrics"], {**models, "champion": numbers}),
        "differences": _by_name(own["metrics"], others),
        "comparable": comparable,
        "unmeasured": unmeasured,
    }


def _by_name(
    names: Iterable[str], models: Mapping[str, Mapping[str, Metric]]
) -> dict[str, dict[str, Metric]]:
    """Metric name -> model -> metric, as in metrics.json, without those that no model has."""
    metrics_of = {
        name: {model: metrics[name] for model, metrics in models.items() if name in metrics}
        for name in names
    }
    return {name: by_model for name, by_model in metrics_of.items() if by_model}


def _metrics_file(registry: Registry, version: Version) -> dict[str, Any]:
    """Content of a version's metrics.json; without metrics if it has none."""
    for entry in version.manifest["files"]:
        if entry.path == METRICS:
            root = f"{registry.root}/{version.name}"
            return dict(json.loads(read_checked(registry.fs, root, METRICS, entry.sha256)))
    return {"metrics": {}, "differences": {}, "fingerprint": None}


def _of(metrics: Mapping[str, Mapping[str, Metric]], model: str) -> dict[str, Metric]:
    return {name: models[model] for name, models in metrics.items() if model in models}


def _rows(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of metric_rows, under the names of the versions."""
    version = facts["version"]
    champion = facts["champion"]
    titles = {
        "tuned": version,
        "champion": f"champion {champion}",
        "tuned - base": f"{version} - base",
        "tuned - champion": f"{version} - {champion}",
    }
    return [
        {titles.get(title, title): value for title, value in row.items()}
        for row in metric_rows(facts["metrics"], facts["differences"])
    ]
