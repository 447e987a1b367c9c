"""The flow `finetune`: from a source of images to a published, evaluated model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from prefect import flow, runtime, task
from prefect.client.schemas.objects import State
from prefect.states import Completed

from artifacts.latent_shards import open_latents
from artifacts.store import Artifact
from configs.errors import Away, Failed
from configs.load_recipe import load_recipe
from configs.secrets import redacted_errors
from configs.settings.recipe import STAGES, StageName
from flows import prefect_run
from flows.checks import check_gate_rules, prepare
from flows.run import Run
from flows.send_stage import run_task
from tasks.download import DownloadStage
from tasks.encode.stage import EncodeStage
from tasks.evaluate.stage import EvaluateStage, compared_metrics
from tasks.progress import artifact_key, show_in_prefect
from tasks.publish.register import register, show_version
from tasks.publish.stage import PublishStage, Rejected, VerdictStage, lineage_of, read_metrics
from tasks.stage import StageResult, failing, storing
from tasks.train import TrainStage, check_epochs

#: Stage name -> function that returns the panels of its artifact.
SHOWS = {
    stage.name: stage.show
    for stage in (DownloadStage, EncodeStage, TrainStage, EvaluateStage, PublishStage)
}

#: Reports of the flows that this process has ended: Prefect's server may be away then.
reports: list[dict[str, Any]] = []


@task(**prefect_run.stage_task("download"))
@redacted_errors()
def download(run: Run) -> StageResult:
    """Fetch, check and resize the pictures of the source to image shards."""
    plan = run.plan()
    stage = DownloadStage.of(run.recipe, plan, run.store, run.retry_run)
    return run.ended(run.build(stage, [plan.artifact]), stage.show)


@task(**prefect_run.stage_task("encode"))
@redacted_errors()
def encode(run: Run, images: StageResult) -> StageResult:
    """Encode pictures and captions with the base's encoders to latent shards."""
    stage = EncodeStage(run.recipe, images.load(run.store), run.base)
    return run.ended(run.build(stage, [images]), stage.show)


@task(**prefect_run.stage_task("train"))
@redacted_errors()
def train(run: Run, latents: StageResult) -> StageResult:
    """Fine-tune the base; a retry resumes from the newest checkpoint."""
    encoded = latents.load(run.store)
    stage = TrainStage(run.recipe, encoded, run.base, run.measuring.clip)
    with failing("train"):
        opened = open_latents(encoded.uri)
        check_gate_rules(run.recipe, opened)
        check_epochs(run.recipe.train, opened.training)
        run.check_rivals(stage)
    return run.ended(run.build(stage, [latents]), stage.show)


@task(**prefect_run.stage_task("evaluate"))
@redacted_errors()
def evaluate(
    run: Run, images: StageResult, latents: StageResult, trained: StageResult
) -> StageResult:
    """Measure the tuned model against its base, on the same prompts and noise.

    The champion is measured too, where a rule of the gate names it and it was measured otherwise.
    """
    before = (images, latents, trained)
    pictures, encoded, tuned = (result.load(run.store) for result in before)
    stage = EvaluateStage(run.eval_inputs(pictures, encoded), tuned)
    result = run.build(stage, before)
    _measure_champion(run, stage, result.load(run.store), before)
    return run.ended(result, stage.show)


def _measure_champion(
    run: Run, stage: EvaluateStage, measured: Artifact, before: Sequence[StageResult]
) -> None:
    """Measure the champion, if the gate will ask. Raises Away if the champion changes."""
    champion = run.champion_to_measure(stage.trained, measured)
    if champion is None:
        return
    try:
        run.champion_metrics(stage.data, measured, before)(champion.uri)
    except Failed as error:  # from a worker that has found another champion
        if run.champion_to_measure(stage.trained, measured) == champion:
            raise
        raise Away(f"another model became the champion meanwhile: {error}") from error


@task(**prefect_run.stage_task("publish"))
@redacted_errors()
def publish(
    run: Run,
    images: StageResult,
    latents: StageResult,
    trained: StageResult,
    evaluated: StageResult,
) -> StageResult:
    """Publish the model if it passes the gate; a new version becomes the champion."""
    run.check_start(trained.digest)
    before = (images, latents, trained, evaluated)
    pictures, encoded, tuned, measured = (result.load(run.store) for result in before)
    metrics = run.champion_metrics(run.eval_inputs(pictures, encoded), measured, before[:3])
    lineage = lineage_of(pictures, encoded, tuned, measured)
    stage = PublishStage(run.recipe, run.base, tuned, measured, run.force, lineage, metrics)
    try:
        result = run.build(stage)
    except Rejected as rejection:
        return prefect_run.rejected(
            run.model_name, run.build(VerdictStage(stage, rejection)), rejection
        )
    with failing(stage.name), storing(run.store):
        compared = compared_metrics(read_metrics(result.load(run.store)))
    registered = register(run.recipe, run.base, run.store, (*before, result), SHOWS, run.start)
    if registered.pop("promoted"):  # not again for a model that is reused
        prefect_run.emit_published(
            run.model_name, registered["model"], evaluated.facts.get("metrics", {})
        )
    version = partial(show_version, run.model_name, registered)
    show_in_prefect(artifact_key(run.model_name, "model"), run.model_name, version)
    return run.ended(replace(result, facts=registered | compared), stage.show)


@flow(name="finetune", flow_run_name=prefect_run.run_name("finetune {recipe}"))
def finetune(
    recipe: prefect_run.RecipeName = "digits",
    overrides: prefect_run.Overrides = prefect_run.NO_OVERRIDES,
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
    model adds the `champion` and its last move, a rejected model the verdicts of the `gate` and the
    artifact `verdict` with every number.
    """
    prefect_run.prepare_process()
    run_id = runtime.flow_run.id
    with redacted_errors():
        checked = load_recipe(recipe, prefect_run.revealed(overrides))
        run = prepare(checked, until=until, run_id=run_id, retry_failed=retry_failed, force=force)
    states = list(islice(stages_of(run), 1 + STAGES.index(until)))
    return final_state(report_of([state.result() for state in states]), states[-1])


def stages_of(run: Run) -> Iterator[Any]:
    """The final state of each stage, in order."""
    place = run.recipe.place
    run_argument = prefect_run.without_edges(run)
    yield (images := run_task(download, place, run_argument))
    yield (latents := run_task(encode, place, run_argument, images))
    yield (trained := run_task(train, place, run_argument, latents))
    yield (evaluated := run_task(evaluate, place, run_argument, images, latents, trained))
    yield run_task(publish, place, run_argument, images, latents, trained, evaluated)


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
    if last.stage == PublishStage.name:
        status = "rejected" if last.outcome == "rejected" else "published"
    shown = ("key", "uri", "outcome", "seconds")
    stages = {
        result.stage: {name: getattr(result, name) for name in shown}
        for result in results
        if result.outcome != "rejected"
    }
    report: dict[str, Any] = {"status": status, "stages": stages, "model": None, "metrics": {}}
    for result in results:
        report |= result.facts
    return report
