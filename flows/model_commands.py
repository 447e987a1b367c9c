"""Commands on published models: sign, verify, push, history, show.

`show_model` prints a version's metrics beside its base's and the champion's, from the registry.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from artifacts.filesystems import subfolders
from artifacts.models import resolve_model
from artifacts.records import first_fault, read_checked
from artifacts.store import Store
from configs.errors import Refused
from configs.secrets import one_line
from tasks.evaluate.distances import Metric, differences
from tasks.evaluate.metrics import metric_rows
from tasks.evaluate.published import published_estimates
from tasks.panels import aligned
from tasks.publish.hub import SIGNATURE, push, sign_version, verify_folder
from tasks.publish.registry import Registry, Version, last
from tasks.stage import METRICS


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


def is_model(url: str, what: str) -> bool:
    """Whether a word names a model of the registry, or a folder, and not an artifact's key."""
    return is_published(url, what) or Path(what).is_dir()


def _names(url: str) -> list[str]:
    place = Store(url)
    return subfolders(place.fs, place.root)


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
    checked = list[dict[str, Any]]()
    is_folder = folder.is_dir() and model.partition("@")[0] not in _names(url)
    if is_folder and key is None:
        raise Refused(f"{folder}: a folder is verified against a public key: add --key")
    if not is_folder:
        registry, version = find_version(url, model)
        root = f"{registry.root}/{version.name}"
        fault = first_fault(registry.fs, root, version.manifest["files"], deep=True)
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
    """Print every change of the champion, oldest first. Raises Refused without one."""
    moves = Registry(url, name).history()
    if not moves:
        known = ", ".join(_names(url)) or "none"
        raise Refused(f"{name}: there is no champion (the registry's models are: {known})")
    if as_json:
        shown = [{part: move[part] for part in ("version", "why", "at")} for move in moves]
        print(json.dumps({"name": name, "champion": last(moves), "history": shown}))
        return
    for move in moves:
        print(f"{move['at']}  {move['version']:5} {move['why']}")


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
    own = _published(registry, version)
    unmeasured = [] if own["metrics"] else [version.name]
    numbers = dict[str, Metric]()
    compared = dict[str, Metric]()
    comparable = True
    if champion is not None and champion.name != version.name:
        theirs = _published(registry, champion)
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


def _published(registry: Registry, version: Version) -> dict[str, Any]:
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
