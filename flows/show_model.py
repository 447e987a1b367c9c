"""Print a published version's metrics beside its base's and the champion's, from the registry."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from artifacts.records import read_checked
from flows.model_commands import find_version
from tasks.evaluate.distances import Metric, differences
from tasks.evaluate.metrics import metric_rows
from tasks.evaluate.published import published_estimates
from tasks.panels import aligned
from tasks.publish.registry import Registry, Version
from tasks.stage import METRICS


def show_model(url: str, model: str, *, as_json: bool) -> None:
    """Print a version with its metrics, and the champion's if that is another version.

    Args:
        model: as of `find_version`.

    Raises:
        RegistryError: the version does not exist, or the champion is damaged.
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
        "versions": [one.name for one in registry.versions()],
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
    numbers, compared, comparable = dict[str, Metric](), dict[str, Metric](), True
    if champion is not None and champion.name != version.name:
        theirs = _published(registry, champion)
        unmeasured += [] if theirs["metrics"] else [champion.name]
        numbers = _of(theirs["metrics"], "tuned")
        if own["fingerprint"] == theirs["fingerprint"]:
            pair = (published_estimates(one.uri, own["fingerprint"]) for one in (version, champion))
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
    found = {
        name: {model: metrics[name] for model, metrics in models.items() if name in metrics}
        for name in names
    }
    return {name: one for name, one in found.items() if one}


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
    version, champion = facts["version"], facts["champion"]
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
