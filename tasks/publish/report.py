"""`report.html`: the output of every stage on one self-contained page."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from artifacts.store import Artifact, Store
from configs.load_recipe import dump_yaml
from configs.secrets import without_secrets
from configs.settings.recipe import Recipe
from configs.settings.train import Train
from tasks.panels import Facts, Panel, Table, render_html
from tasks.publish.model_card import base_name, published_settings
from tasks.publish.registry import Version
from tasks.publish.stage import remeasured_champion
from tasks.stage import REPORT, StageResult

log = logging.getLogger("kiln")


def page(
    recipe: Recipe,
    stages: Sequence[tuple[Artifact, StageResult]],
    shows: Mapping[str, Callable[[Artifact], list[Panel]]],
) -> str:
    """The HTML page, with all external text escaped.

    Args:
        stages: artifact and result of each stage, in the order of the flow.
        shows: stage name -> function that returns the panels of its artifact.
    """
    settings = published_settings(recipe)
    sections = [
        {"name": artifact.stage, "panels": _panels(artifact, shows)} for artifact, _ in stages
    ]
    return render_html(
        "publish/report.html.jinja",
        name=recipe.publish.name,
        description=recipe.description,
        verdict=_verdict(len(recipe.publish.gate), stages[-1][0]),
        facts=_facts(
            recipe.train, base_name(recipe.model.path), [artifact for artifact, _ in stages]
        ),
        built=[Table("What was built, and why", [_built(*stage) for stage in stages])],
        source=[Facts("Source", _flat(settings["source"]))],
        stages=sections,
        recipe=dump_yaml(settings),
    )


def champion_evaluation(
    champion: Version | None, evaluated: Artifact, published: Artifact
) -> Artifact | None:
    """The champion's evaluation, if the store has it and it compares.

    It is the gate's new measurement, else the evaluation that the champion was published with.
    """
    if (again := remeasured_champion(published)) is not None:
        return again
    parents = champion.manifest["run"].get("parents", {}) if champion else {}
    parent = parents.get("evaluation")
    theirs = published.store.load(parent["stage"], parent["key"]) if parent else None
    if theirs is None or theirs.summary.get("fingerprint") != evaluated.summary.get("fingerprint"):
        return None
    return None if theirs.key == evaluated.key else theirs


def _verdict(rules: int, published: Artifact) -> dict[str, str]:
    """The gate's verdict: its kind (passed, forced or unjudged) and its text, with a mark."""
    if (reason := published.summary.get("forced")) is not None:
        return {"kind": "forced", "text": f"✗ failed, and forced: {reason}"}
    if not rules:
        return {"kind": "unjudged", "text": "published without rules"}
    passed = f"passed all {rules} rules" if rules > 1 else "passed its rule"
    return {"kind": "passed", "text": f"✓ {passed}"}


def _facts(settings: Train, base: str, artifacts: Sequence[Artifact]) -> dict[str, Any]:
    """The line of facts under the title, after the verdict."""
    published = artifacts[-1]
    run = artifacts[2].manifest["run"] if len(artifacts) > 2 else {}
    trained = artifacts[2].summary if len(artifacts) > 2 else {}
    steps = trained.get("steps", settings.steps)  # retraining and train.epochs change them
    chosen = f" (step {trained['chosen_step']} chosen)" if "chosen_step" in trained else ""
    facts = {
        "Champion before": published.summary.get("compared_with") or "none",
        "Base": base,
        "Trained": f"{steps} steps{chosen}, {settings.method}",
        "On": run.get("device"),
        "Licence": published.summary.get("license"),
        "Date": published.manifest["run"].get("created", "")[:10],
    }
    return {name: value for name, value in facts.items() if value}


def _built(artifact: Artifact, result: StageResult) -> dict[str, Any]:
    run = artifact.manifest["run"]
    is_built = result.outcome == "built"
    return {
        "stage": artifact.stage,
        "outcome": result.outcome,
        "why": run.get("reason", "") if is_built else "its settings and inputs are unchanged",
        "seconds": round(float(run.get("seconds", 0) if is_built else result.seconds), 1),
        "built at": run.get("created", "")[:16].replace("T", " "),
        "key": artifact.key[:12],
    }


def _flat(source: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in source.items() if value not in (None, [], {})}


def _panels(
    artifact: Artifact, shows: Mapping[str, Callable[[Artifact], list[Panel]]]
) -> list[Panel]:
    """The panels of a stage's artifact; an error, such as of an odd picture, is shown instead.

    Paths of facts are relative to the store, since readers elsewhere lack it.
    """
    try:
        return [_relative(panel, artifact.store) for panel in shows[artifact.stage](artifact)]
    except Exception as error:
        reason = without_secrets(repr(error))
        log.warning("%s: %s is not shown: %s", REPORT, artifact.stage, reason)
        return [Facts("Not shown", {"error": reason})]


def _relative(panel: Panel, store: Store) -> Panel:
    if not isinstance(panel, Facts):
        return panel
    values = {name: _within(value, f"{store.url}/") for name, value in panel.values.items()}
    return replace(panel, values=values)


def _within(value: Any, store: str) -> Any:
    return value.removeprefix(store) if isinstance(value, str) else value
