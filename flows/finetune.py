"""The flow `finetune`: from a source of images to a published, evaluated model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any
from uuid import uuid4

from prefect import flow, runtime, task
from prefect.client.schemas.objects import State
from prefect.states import Completed

from artifacts.latent_shards import open_latents
from artifacts.store import Artifact
from configs.errors import Away, Failed
from configs.load_recipe import load_recipe
from configs.secrets import redacted_errors
from configs.settings.recipe import STAGES, StageName
from flows.checks import check_gate_rules, prepare
from flows.prefect_run import (
    NO_OVERRIDES,
    Overrides,
    RecipeName,
    compared_metrics,
    emit_published,
    ended,
    prepare_process,
    rejected,
    revealed,
    run_name,
    stage_task,
    without_edges,
)
from flows.run import Run
from flows.send_stage import run_task
from tasks import download as download_stage
from tasks import train as train_stage
from tasks.beam.workers import REPORTS
from tasks.encode import stage as encode_stage
from tasks.evaluate import stage as evaluate_stage
from tasks.evaluate.inputs import EvalInputs
from tasks.progress import artifact_key, show_in_prefect
from tasks.publish import rejection as rejection_artifact
from tasks.publish import stage as publish_stage
from tasks.publish.register import register, show_version
from tasks.retrain.champion import check_rivals_held_out
from tasks.stage import StageResult, build_or_reuse, failing, storing, versions

#: Stage name -> function that returns the panels of its artifact.
SHOWS = {
    module.STAGE: module.show
    for module in (download_stage, encode_stage, train_stage, evaluate_stage, publish_stage)
}

#: Reports of the flows that this process has ended: Prefect's server may be away then.
reports: list[dict[str, Any]] = []


@task(**stage_task("download"))
@redacted_errors()
def download(run: Run) -> StageResult:
    """Fetch, check and resize the pictures of the source to image shards."""
    plan = run.plan()
    again = run.retry_run is not None
    retry = download_stage.choose_retry(run.recipe, plan, run.store, retry_failed=again)
    parts = download_stage.key_parts(run.recipe, plan, retry)
    progress = run.begin(parts)
    build = partial(
        download_stage.build, run.recipe, plan, progress=progress, retry_run=run.retry_run
    )
    parents = {"plan": plan.artifact}
    result = build_or_reuse(
        run.store, parts, build, parents=parents, send=run.send(parts, progress, [plan.artifact])
    )
    summary = result.load(run.store).summary
    download_stage.check_data(summary, run.recipe.download)
    has_captions = getattr(run.recipe.source, "caption_column", "caption") is not None
    download_stage.warn_of_captions(summary, expected=has_captions)
    return ended(run.store, run.model_name, result, download_stage.show)


@task(**stage_task("encode"))
@redacted_errors()
def encode(run: Run, images: StageResult) -> StageResult:
    """Encode pictures and captions with the base's encoders to latent shards."""
    pictures = images.load(run.store)
    inputs = (run.recipe, pictures, run.base)
    parts = encode_stage.key_parts(*inputs)
    progress = run.begin(parts)
    build = partial(encode_stage.build, *inputs, progress=progress)
    reports = f"{run.store.root}/{parts.stage}/{parts.key}/{REPORTS}-{uuid4().hex}"
    share = partial(encode_stage.encode_missing, *inputs, run.store, reports, progress)
    parents = {"images": pictures}
    result = build_or_reuse(
        *(run.store, parts, build),
        parents=parents,
        help_builder=share,
        versions=partial(versions, run.recipe.runtime),
        send=run.send(parts, progress, [images]),
    )
    summary = result.load(run.store).summary
    settings = run.recipe.encode
    encode_stage.check(summary, settings.max_bad)
    encode_stage.warn_of_few_held_out(summary, settings.holdout)
    encode_stage.tell_cut_captions(summary)
    return ended(run.store, run.model_name, result, encode_stage.show)


@task(**stage_task("train"))
@redacted_errors()
def train(run: Run, latents: StageResult) -> StageResult:
    """Fine-tune the base; a retry resumes from the newest checkpoint."""
    encoded = latents.load(run.store)
    with failing("train"):
        opened = open_latents(encoded.uri)
        check_gate_rules(run.recipe, opened)
        train_stage.check_epochs(run.recipe.train, opened.training)
    clip = run.measuring.clip
    parts = train_stage.key_parts(run.recipe, encoded, run.base, clip)
    is_judged = publish_stage.STAGE in run.stages and run.force is None and run.champion is None
    if is_judged and run.store.find(train_stage.STAGE, parts.key) is None:
        with failing("train"):  # weights in the store may have been published before
            check_rivals_held_out(run.recipe, run.store, encoded)
    progress = run.begin(parts)
    inputs = (run.recipe, encoded, run.base, clip)
    build = partial(train_stage.build, *inputs, progress=progress)
    parents = {"latents": encoded}
    result = build_or_reuse(
        run.store, parts, build, parents=parents, send=run.send(parts, progress, [latents])
    )
    return ended(run.store, run.model_name, result, train_stage.show)


@task(**stage_task("evaluate"))
@redacted_errors()
def evaluate(
    run: Run, images: StageResult, latents: StageResult, trained: StageResult
) -> StageResult:
    """Measure the tuned model against its base, on the same prompts and noise.

    The champion is measured too, where a rule of the gate names it and it was measured otherwise.
    """
    before = (images, latents, trained)
    pictures, encoded, tuned = (one.load(run.store) for one in before)
    given = run.eval_inputs(pictures, encoded)
    parts = evaluate_stage.key_parts(given, tuned)
    progress = run.begin(parts)
    build = partial(evaluate_stage.build, given, tuned, progress=progress)
    parents = {"images": given.images, "latents": given.latents, "model": tuned}
    result = build_or_reuse(
        run.store, parts, build, parents=parents, send=run.send(parts, progress, before)
    )
    measured = result.load(run.store)
    _measure_champion(run, given, tuned, measured, before)
    facts = compared_metrics(measured.summary)
    return ended(run.store, run.model_name, replace(result, facts=facts), evaluate_stage.show)


def _measure_champion(
    run: Run,
    given: EvalInputs,
    tuned: Artifact,
    measured: Artifact,
    before: Sequence[StageResult],
) -> None:
    """Measure the champion, if the gate will ask. Raises Away if it changes meanwhile."""
    champion = run.champion_to_measure(tuned, measured)
    if champion is None:
        return
    try:
        run.champion_metrics(given, measured, before)(champion.uri)
    except Failed as error:  # of a worker that has found another champion
        if run.champion_to_measure(tuned, measured) == champion:
            raise
        raise Away(f"another model became the champion meanwhile: {error}") from error


@task(**stage_task("publish"))
@redacted_errors()
def publish(
    run: Run,
    images: StageResult,
    latents: StageResult,
    trained: StageResult,
    evaluated: StageResult,
) -> StageResult:
    """Publish the model if it passes the gate; a new version becomes the champion."""
    run.check_start_is_champion(trained.digest)
    before = (images, latents, trained, evaluated)
    pictures, encoded, tuned, measured = (one.load(run.store) for one in before)
    parts = publish_stage.key_parts(run.recipe, tuned, measured, run.base, run.force)
    given = run.eval_inputs(pictures, encoded)
    lineage = publish_stage.lineage_of(pictures, encoded, tuned, measured)
    publication = publish_stage.Publication(
        run.recipe, tuned, measured, lineage, run.base, run.force
    )
    metrics = run.champion_metrics(given, measured, before[:3])
    build = partial(publish_stage.build, publication, metrics, progress=run.begin(parts))
    parents = {"model": tuned, "evaluation": measured}
    try:
        result = build_or_reuse(run.store, parts, build, parents=parents)
    except publish_stage.Rejected as rejection:
        parts = rejection_artifact.key_parts(parts, rejection)
        run.begin(parts)
        build = partial(rejection_artifact.build, rejection)
        result = build_or_reuse(run.store, parts, build, parents=parents)
        return rejected(run.model_name, result, rejection)
    with failing(publish_stage.STAGE), storing(run.store):
        compared = compared_metrics(publish_stage.read_metrics(result.load(run.store)))
    start = None if run.champion is None else run.champion.version
    registered = register(run.recipe, run.base, run.store, (*before, result), SHOWS, start)
    if registered.pop("promoted"):  # not again for a model that is reused
        emit_published(run.model_name, registered["model"], evaluated.facts.get("metrics", {}))
    version = partial(show_version, run.model_name, registered)
    show_in_prefect(artifact_key(run.model_name, "model"), run.model_name, version)
    result = replace(result, facts=registered | compared)
    return ended(run.store, run.model_name, result, publish_stage.show)


@flow(name="finetune", flow_run_name=run_name("finetune {recipe}"))
def finetune(
    recipe: RecipeName = "digits",
    overrides: Overrides = NO_OVERRIDES,
    until: StageName = "publish",
    retry_failed: bool = False,
    force: str | None = None,
) -> Any:
    """Download, encode, train, evaluate, publish; a stage with equal inputs is reused.

    Args:
        recipe: Name or path of a recipe (`kiln recipes` lists them).
        overrides: Dotted settings to change, such as {"train.steps": 100}.
        until: The last stage to run.
        retry_failed: Whether to fetch rows with transient failures again (timeout, 5xx).
        force: The reason to publish a model that fails the gate. Its card and the history name it.

    Returns a report (as `kiln run --json` prints it): status, stages, model, metrics; a published
    model adds the `champion` and its last move, a rejected one the verdicts of the `gate` and the
    artifact `verdict` with every number.
    """
    prepare_process()
    run_id = runtime.flow_run.id
    with redacted_errors():
        checked = load_recipe(recipe, revealed(overrides))
        run = prepare(checked, until=until, run_id=run_id, retry_failed=retry_failed, force=force)
    states = list(islice(stages_of(run), 1 + STAGES.index(until)))
    return final_state(report_of([state.result() for state in states]), states[-1])


def stages_of(run: Run) -> Iterator[Any]:
    """The final state of each stage, in order."""
    recipe = run.recipe
    given = without_edges(run)
    yield (images := run_task(download, recipe, given))
    yield (latents := run_task(encode, recipe, given, images))
    yield (trained := run_task(train, recipe, given, latents))
    yield (evaluated := run_task(evaluate, recipe, given, images, latents, trained))
    yield run_task(publish, recipe, given, images, latents, trained, evaluated)


def final_state(report: dict[str, Any], last: State[Any]) -> Any:
    """A flow's final state: its report, named Rejected if the gate refused the model.

    Args:
        last: state of the last stage; its message has the verdict.
    """
    reports.append(report)
    if report["status"] == "rejected":  # a measured outcome, not a failure
        return Completed(name="Rejected", message=last.message, data=report)
    return report


def report_of(results: Sequence[StageResult]) -> dict[str, Any]:
    """The report of a run, from the result of each stage, in order."""
    last = results[-1]
    status = "built"
    if last.stage == publish_stage.STAGE:
        status = "rejected" if last.outcome == "rejected" else "published"
    shown = ("key", "uri", "outcome", "seconds")
    stages = {
        one.stage: {name: getattr(one, name) for name in shown}
        for one in results
        if one.outcome != "rejected"
    }
    report: dict[str, Any] = {"status": status, "stages": stages, "model": None, "metrics": {}}
    for one in results:
        report |= one.facts
    return report
