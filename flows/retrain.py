"""The flow `retrain`: train on what is new in a source, from the champion, if the gate agrees."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from prefect import flow, runtime, task
from prefect.states import Completed

from artifacts.errors import retrying
from artifacts.gc import record_registry
from artifacts.latent_shards import open_latents
from artifacts.lock import hold, owner_in_words
from configs.load_recipe import load_retrained
from configs.secrets import one_line, redacted_errors
from configs.settings.recipe import Recipe
from flows import flow_process, task_limits
from flows.finetune import TASKS, final_state, report_of, stages_of, train
from flows.run import Run, check_gate_rules, prepare, stages_until
from flows.send_stage import run_task
from tasks import download as download_stage
from tasks.build_or_reuse import StageResult, failing
from tasks.progress import artifact_key, show_in_prefect
from tasks.publish.registry import Registry
from tasks.publish.stage import VerdictStage, registry_of
from tasks.retrain.champion import Champion, check_held_out, find_champion
from tasks.retrain.decision import (
    ContinuedTraining,
    DecisionStage,
    check_start,
    recipe_of,
    show_retraining,
    verdict_of,
)
from tasks.retrain.selection import (
    Changes,
    SelectionStage,
    merged_changes,
    new_samples,
    plan_changes,
)

log = logging.getLogger("kiln")
LOCK = "retrain-lock.json"  # in the model's folder of the registry


class Compared(NamedTuple):
    """What changed since the champion, and why nothing is trained, if so."""

    champion: Champion | None
    changes: Changes
    unchanged: str | None


@task(**task_limits.stage_task("compare"))
@redacted_errors()
def compare(run: Run) -> Compared:
    """Compare the source with the champion's rows, and with the decisions made before."""
    run = run.with_drawn_source()
    with failing("retrain"):
        registry = registry_of(run.recipe)
        champion = find_champion(registry, run.store)
        if champion is not None:  # its registry may have moved since the publication
            record_registry(run.store, registry.store)
        changes = _changes_of(run, champion)
        decision = DecisionStage(run.recipe, changes, champion, run.model_digests())
        if decision.too_few_rows is None:  # before it is looked for: `kiln gc` keeps what runs need
            run.begin(decision.parts)
        why = decision.why_unchanged(run.store)
        if why is not None:
            log.info("retrain: unchanged: %s", why)
        elif champion is not None:
            continues = run.recipe.retrain.start == "champion"
            for part, rival in _beside(run, champion):
                check_held_out(part, run.store, rival, continues=continues)
            if continues:
                start = champion.load(run.store, "train", champion.trained)
                check_start(run.recipe, run.base, start)
    return Compared(champion, changes, why)


def _changes_of(run: Run, champion: Champion | None) -> Changes:
    """What changed since the champion; of a mixture, the sum over its sources, which are told."""
    changes = {}
    for name, part in run.recipe.by_source.items():
        before = champion.of_source(name) if champion and run.recipe.sources else champion
        plan = download_stage.plan(part, run.begin)
        _, changes[name] = plan_changes(part.download, run.store, before, plan)
        if name and champion is not None:
            log.info("retrain: source %s has %s new rows", name, f"{changes[name].new_rows:,}")
    return changes[""] if "" in changes else merged_changes(changes)


def _beside(run: Run, champion: Champion) -> Iterator[tuple[Recipe, Champion]]:
    """The recipe of each source beside the champion with its data, where it was trained on it."""
    for name, part in run.recipe.by_source.items():
        before = champion.of_source(name) if name else champion
        if before is not None:
            yield part, before


@task(**task_limits.stage_task("train"))
@redacted_errors()
def continue_from_champion(run: Run, latents: StageResult) -> StageResult:
    """Train from the champion's weights, on the new samples and a replay of the old samples."""
    champion = run.champion
    assert champion is not None
    encoded = latents.load(run.store)
    old = champion.load(run.store, "encode", champion.latents)
    with failing("train"):
        check_gate_rules(run.recipe, open_latents(run.eval_inputs(encoded, encoded).latents.uri))
        selection = SelectionStage(run.recipe, encoded, old, champion.digest)
        selected = run.build(selection).load(run.store)
        recipe = recipe_of(run.recipe, selected)
        start = champion.load(run.store, "train", champion.trained)
    clip = run.measuring.clip
    stage = ContinuedTraining(recipe, selected, run.base, clip, start, encoded)
    return run.ended(run.build(stage, [latents]), stage.show)


@task(**task_limits.stage_task("conclude"))
@redacted_errors()
def conclude(run: Run, changes: Changes, report: dict[str, Any]) -> None:
    """Record the decision, with the evaluation and the verdict as its parents.

    An undecided model has none: the next retraining looks again.
    """
    if report["status"] == "undecided":
        return
    evaluated = report["stages"].get("evaluate")
    evidence = {
        "evaluation": evaluated and run.store.load("evaluate", evaluated["key"]),
        VerdictStage.name: verdict_of(run.store, report),
    }
    there = {name: artifact for name, artifact in evidence.items() if artifact is not None}
    models = run.model_digests()
    run.build(DecisionStage(run.recipe, changes, run.champion, models, report, there))


@flow(name="retrain", flow_run_name=task_limits.run_name("retrain {recipe}"))
def retrain(
    recipe: task_limits.RecipeName = "digits",
    overrides: task_limits.Overrides = task_limits.NO_OVERRIDES,
) -> Any:
    """Train on new rows of the source, from the champion; the gate decides on the promotion.

    Args:
        recipe: Name or path of a recipe (`kiln recipes` lists them).
        overrides: Dotted settings to change, such as {"retrain.replay": 0.3}.

    Returns a report (as `kiln retrain --json` prints it): `status` (published, awaiting, rejected,
    undecided or unchanged), `why` of an unchanged model, `changes` of the source, `start` (the
    champion), and what `finetune` reports.
    """
    flow_process.prepare_process()
    run_id = runtime.flow_run.id
    with redacted_errors():
        checked = load_retrained(recipe, task_limits.revealed(overrides))
        flow_process.name_run(checked.publish.name)
        run = prepare(checked, run_id=run_id)
        with one_at_a_time(registry_of(run.recipe)):
            return _retrain(run)


def _retrain(run: Run) -> Any:
    champion, changes, unchanged = run_task(compare, run)
    run = replace(run, champion=champion)
    facts = {"changes": asdict(changes), "start": champion and champion.version}
    if unchanged is not None:
        return _unchanged(run, changes, unchanged, facts)
    stages = stages_of(run, {**TASKS, "train": training_task(run)})
    data = [*islice(stages, len(stages_until(run.recipe, "encode")))]
    if champion is not None and not _has_new_samples(run, champion, data[-1].result()):
        why = f"none of the {changes.new_rows:,} new rows has a picture to train on"
        return _unchanged(run, changes, why, facts)
    states = [*data, *stages]
    report = report_of([state.result() for state in states]) | facts
    try:
        run_task(conclude, run, changes, report)
    except Exception as error:  # the model is published, or measured and rejected: that stands
        again = "the decision is not recorded: an equal retraining may run again"
        log.warning("retrain: %s: %s", again, one_line(error))
    _show(run, changes, report)
    return final_state(report, states[-1])


def training_task(run: Run) -> Any:
    """The Prefect task that continues the champion's training, or trains from the base."""
    return continue_from_champion if run.continues else train


def _has_new_samples(run: Run, champion: Champion, latents: StageResult) -> bool:
    def count() -> int:
        whole = latents.load(run.store)
        if "sources" in whole.summary:  # it trains on all samples, of new sources too
            return int(champion.latents != whole.key)
        old = champion.load(run.store, "encode", champion.latents)
        return new_samples(whole, old)

    return retrying(count) > 0


def _unchanged(run: Run, changes: Changes, why: str, facts: dict[str, Any]) -> Any:
    report = {"status": "unchanged", "why": why, "stages": {}, "model": None, "metrics": {}} | facts
    _show(run, changes, report)
    return Completed(name="Unchanged", message=why, data=report)


def _show(run: Run, changes: Changes, report: dict[str, Any]) -> None:
    panels = partial(show_retraining, run.model_name, run.store, run.champion, changes, report)
    key = artifact_key(run.model_name, DecisionStage.name)
    show_in_prefect(key, f"{run.model_name}: {report['status']}", panels)


@contextmanager
def one_at_a_time(registry: Registry) -> Iterator[None]:
    """Wait until no other retraining of the model runs, on this server or another."""

    def waits(owner: dict[str, Any]) -> None:
        log.info("retrain: %s retrains %s; waiting", owner_in_words(owner), registry.name)

    with hold(registry.fs, f"{registry.root}/{LOCK}", on_wait=waits):
        yield
