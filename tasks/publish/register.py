"""Registration of a published model: the next version, its champion, its report, the hub.

`report.html`: the output of every stage on one self-contained page.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from artifacts.records import write_atomic
from artifacts.store import Artifact, Store
from configs.errors import Away
from configs.load_recipe import dump_yaml
from configs.secrets import without_secrets
from configs.settings.recipe import OPTIONAL_STAGES, STAGES, Hub, Recipe
from runtimes.pipeline_folder.folder import Base
from tasks.build_or_reuse import GATE, GRID, METRICS, REPORT, StageResult, failing, storing
from tasks.evaluate.metrics import metric_rows
from tasks.evaluate.stage import compared_metrics
from tasks.panels import Facts, Links, Panel, PicturePanel, Table, render_html
from tasks.progress import stage_links
from tasks.publish import hub
from tasks.publish.champion_alias import AliasNotWritten, Entry, in_words
from tasks.publish.model_card import base_name, hardware_of, published_settings
from tasks.publish.promotion_gate import Verdict, as_rows, needs_champion
from tasks.publish.registry import Registry, Version
from tasks.publish.stage import STAGE, PublishStage, parent_of, remeasured_champion

log = logging.getLogger("kiln")
#: Stages that every recipe has.
STAGES_OF_ALL = [stage for stage in STAGES if stage not in OPTIONAL_STAGES]


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
    sources = {n: published_settings(part)["source"] for n, part in recipe.by_source.items()}
    sections = [
        {"name": artifact.stage, "panels": _panels(artifact, shows)} for artifact, _ in stages
    ]
    return render_html(
        "publish/report.html.jinja",
        name=recipe.publish.name,
        description=recipe.description,
        verdict=_verdict(len(recipe.publish.gate), stages[-1][0]),
        facts=_facts(recipe, [artifact for artifact, _ in stages]),
        built=[Table("What was built, and why", [_built(*stage) for stage in stages])],
        source=[
            Facts(
                f"Source {name}".strip(), {n: v for n, v in of.items() if v not in (None, [], {})}
            )
            for name, of in sources.items()
        ],
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
    if champion is None:
        return None
    evaluation = parent_of(champion.manifest, "evaluation", published.store)
    if evaluation is None or evaluation.key == evaluated.key:
        return None
    fingerprints = [a.summary.get("fingerprint") for a in (evaluation, evaluated)]
    return evaluation if fingerprints[0] == fingerprints[1] else None


def _verdict(rules: int, published: Artifact) -> dict[str, str]:
    """The gate's verdict: its kind (passed, forced or unjudged) and its text, with a mark."""
    if (reason := published.summary.get("forced")) is not None:
        return {"kind": "forced", "text": f"✗ failed, and forced: {reason}"}
    if not rules:
        return {"kind": "unjudged", "text": "published without rules"}
    passed = f"passed all {rules} rules" if rules > 1 else "passed its rule"
    return {"kind": "passed", "text": f"✓ {passed}"}


def _facts(recipe: Recipe, artifacts: Sequence[Artifact]) -> dict[str, Any]:
    """The line of facts under the title, after the verdict."""
    published = artifacts[-1]
    training = next((artifact for artifact in artifacts if artifact.stage == "train"), None)
    run = training.manifest["run"] if training else {}
    trained = training.summary if training else {}
    steps = trained.get("steps", recipe.train.steps)  # retraining and train.epochs change them
    chosen = f" (step {trained['chosen_step']} chosen)" if "chosen_step" in trained else ""
    facts = {
        "Champion before": published.summary.get("compared_with") or "none",
        "Base": base_name(recipe.model.path),
        "Trained": f"{steps} steps{chosen}, {recipe.train.method}",
        "On": hardware_of(run),
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
    values = {
        name: value.removeprefix(f"{store.url}/") if isinstance(value, str) else value
        for name, value in panel.values.items()
    }
    return replace(panel, values=values)


def register(
    recipe: Recipe,
    base: Base,
    store: Store,
    results: Sequence[StageResult],
    shows: Mapping[str, Callable[..., list[Panel]]],
    start: str | None = None,
) -> dict[str, Any]:
    """Copy the model and its report to the registry; a new version becomes champion or candidate.

    Args:
        results: one per stage, in the order of the flow.
        shows: stage name -> function that returns the panels of its artifact.
        start: the version that must still be the champion; None: do not check.

    Returns {"model": URL of the version, "champion": the registry's last move, "is_new": whether
    this call made it the champion or a candidate, "hub": the repository, "metrics" and
    "differences"}; of a candidate also "candidate", "status" (awaiting or rejected) and "why".
    After a rollback the champion may be another version. An error in the report, or after the
    promotion, is logged.

    Raises:
        Away: the gate compared with another champion, or another run's
            `keep_versions` has deleted the version: a retry publishes it again.
    """
    artifacts = [result.load(store) for result in results]
    trained, evaluated, published = artifacts[-3:]
    model = PublishStage(recipe, base, trained, evaluated)
    registry = model.registry
    with failing(STAGE), storing(store):
        has_metrics = any(file.path == METRICS for file in published.files)
        compared = compared_metrics(json.loads(published.read(METRICS)) if has_metrics else {})
    with storing(store):
        path = f"{published.path}/{REPORT}"
        if results[-1].outcome == "built" or not store.fs.exists(path):
            with _warning(f"{REPORT} is missing"):
                html = _page(model, list(zip(artifacts, results, strict=True)), shows)
                write_atomic(store.fs, path, html.encode())
    with storing(registry.store):
        version = registry.publish(published)
        if recipe.publish.signing_key is not None:  # before anyone may use it
            with failing(STAGE):
                hub.sign_version(registry, version, recipe.publish.signing_key)
        registered: dict[str, Any] = {"model": version.uri, "champion": None, "is_new": True}
        if registry.was_champion(version.name):
            registered["is_new"] = False
            with _warning("the alias is not mended"):
                registry.mend_alias()
        elif recipe.publish.promote == "manual" or registry.history().rejection(version.model):
            registered |= _propose(model, version, published, start)
        else:
            _promote(model, version, published, start)
    with _warning("the champion is not shown"):
        registered["champion"] = registry.last_move()
    if recipe.publish.keep_versions is not None:
        with _warning("old versions are kept"):
            for name in registry.keep(recipe.publish.keep_versions):
                log.info("publish: %s %s is deleted: publish.keep_versions", registry.name, name)
    if recipe.publish.hub is not None:
        registered["hub"] = _pushed(recipe.publish.hub, registry, version)
    return registered | compared


def _page(
    model: PublishStage,
    stages: Sequence[tuple[Artifact, StageResult]],
    shows: Mapping[str, Callable[..., list[Panel]]],
) -> str:
    """The report, whose evaluation has the champion too if it is comparable."""
    evaluate = model.evaluated.stage
    champion = champion_evaluation(model.registry.champion(), model.evaluated, stages[-1][0])
    if champion is not None:
        shows = {**shows, evaluate: partial(shows[evaluate], champion=champion)}
    return page(model.recipe, stages, shows)


def _promote(model: PublishStage, version: Version, published: Artifact, start: str | None) -> None:
    """Make the version of a published model the champion.

    Raises Away if another became the champion, or another run deleted the version.

    Args:
        start: as of `register`.
    """
    expected = _expected_champion(model, published, start)
    forced = published.summary["forced"]
    why = "published" if forced is None else f"forced: {forced}"
    try:
        model.registry.promote(version.name, why, expected=expected)
    except AliasNotWritten as error:  # it holds: a retry would not announce it
        log.warning("publish: %s", error)


def _propose(
    model: PublishStage, version: Version, published: Artifact, start: str | None
) -> dict[str, Any]:
    """Let the version of a published model await approval; what `register` returns of it.

    Its verdict holds for the present champion alone if a rule names the champion, or if it was
    trained from its weights. Raises Away as `_promote` does.
    """
    settings = model.recipe.publish
    expected = _expected_champion(model, published, start)
    candidate, is_new = model.registry.propose(
        version,
        settings.approval_days,
        expected=expected,
        bound=start is not None or needs_champion(settings.gate),
        hub=None if settings.hub is None else settings.hub.model_dump(),
        forced=published.summary["forced"],
    )
    status = "rejected" if "rejected" in candidate else "awaiting"
    return {"candidate": candidate, "is_new": is_new, "status": status, "why": in_words(candidate)}


def _expected_champion(model: PublishStage, published: Artifact, start: str | None) -> str | None:
    """The champion that the gate compared with; None: none. Raises Away if it is another now."""
    champion = model.registry.champion()
    expected = champion.name if champion else None
    if start not in (None, expected):
        raise Away(f"{expected} became the champion meanwhile: run again")
    model.check_champion(published.manifest)
    return expected


def approve(registry: Registry, which: str, by: str, why: str) -> Version:
    """Make a candidate the champion, and push it to the hub that its recipe names.

    Args:
        which: its version, or `candidate`.
        by: the person.

    Raises Refused if it does not wait, or its gate compared it with another champion.
    """
    candidate = registry.history().awaiting(which)
    version = registry.version(candidate["version"])
    try:
        registry.approve(version.name, by, why)
    except AliasNotWritten as error:  # it holds: a second approval is refused
        log.warning("publish: %s", error)
    if candidate["hub"] is not None:
        _pushed(Hub(**candidate["hub"]), registry, version)
    return version


def _pushed(settings: Hub, registry: Registry, version: Version) -> str | None:
    """The URL of the commit; None after a failure, whose warning has the command to repeat it.

    None also if another version is the champion, for example after a rollback.
    """
    again = hub.command(registry, version, settings.repo, private=settings.private)
    with _warning(f"{version.uri} is not on the hub; to push it: {again}"):
        champion = registry.champion()
        if champion is not None and champion.name == version.name:
            url = hub.push(registry, version, settings.repo, private=settings.private)
            log.info("publish: pushed to %s", url)
            return url
    return None


@contextmanager
def _warning(what: str) -> Iterator[None]:
    """Log an error, instead of a failed run whose model is published."""
    try:
        yield
    except Exception as error:
        log.warning("%s: %r", what, error)


def show_version(model: str, registered: dict[str, Any], stages: Sequence[str]) -> list[Panel]:
    """The model's URL in the registry, the champion, and links to the model's stages."""
    url = registered["model"]
    champion = registered["champion"]
    facts = {
        "model": url,
        "version": url.rpartition("/")[2],
        "champion": champion["version"] if champion else "none",
        "report": f"{url}/{REPORT}",
    }
    if registered.get("hub"):
        facts["hub"] = registered["hub"]
    return [Facts("Published", facts), stage_links(model, stages)]


def show_candidate(
    registry: Registry, candidate: Entry, form: str | None, stages: Sequence[str] = STAGES_OF_ALL
) -> list[Panel]:
    """What a person decides on: pictures, metrics, differences, verdicts, and where to decide.

    Args:
        form: path of the form in the UI; None without one.
        stages: of its recipe.
    """
    name, compared = candidate["version"], candidate["champion"]
    version = registry.version(name)
    state = registry.history().outcome(candidate)

    def read(file: str, of: str = name) -> bytes:
        return bytes(registry.fs.cat_file(f"{registry.root}/{of}/{file}"))

    facts = {
        "model": version.uri,
        "state": state or in_words(candidate),
        "champion then": compared or "none",
        "report": f"{version.uri}/{REPORT}",
    }
    if (forced := version.manifest["summary"]["forced"]) is not None:
        facts["published in spite of a failed gate"] = forced
    panels: list[Panel] = [Facts("Candidate", facts)]
    if state is None:
        place = f"{name} --registry {registry.store.url}"
        commands = {
            "to promote it": f"kiln promote {registry.name} {place}",
            "to reject it": f"kiln reject {registry.name} {place} --reason TEXT",
        }
        panels += [Links("Decide", {"the form": form})] if form else []
        panels.append(Facts("Commands", commands))
    measured = json.loads(read(METRICS))
    verdicts = [Verdict(**verdict) for verdict in json.loads(read(GATE))]
    panels.append(Table("Gate", as_rows(verdicts)))
    panels.append(PicturePanel(f"Before and after: base above, {name} below", read(GRID)))
    if compared is not None:
        panels.append(PicturePanel(f"Base above, {compared} below", read(GRID, compared)))
    rows = metric_rows(measured["metrics"], measured["differences"])
    panels.append(Table("Metrics and paired differences, with 95% confidence intervals", rows))
    return [*panels, stage_links(registry.name, stages)]
