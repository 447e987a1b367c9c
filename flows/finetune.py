"""The flow `finetune`: from a source of images to a published, evaluated model.

Automations react to the events of a model: published, awaiting approval, or not passed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any
from urllib.parse import quote

from prefect import Task, flow, runtime, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_UI_URL
from prefect.states import Completed

from artifacts.latent_shards import open_latents
from artifacts.store import Artifact
from configs.errors import Away, Failed
from configs.load_recipe import load_recipe
from configs.secrets import one_line, redacted_errors, without_secrets
from configs.settings.recipe import DATA_STAGES, OPTIONAL_STAGES, STAGES, StageName, team_of
from flows import flow_process, task_limits
from flows.run import Run, check_gate_rules, prepare, stages_until
from flows.send_stage import run_task
from tasks.build_or_reuse import REPORT, StageResult, failing
from tasks.caption.stage import CaptionStage
from tasks.describe.stage import DescribeStage
from tasks.download import DownloadStage
from tasks.download.references import REFERENCES, ReferencesStage
from tasks.encode.stage import EncodeStage
from tasks.evaluate.stage import EvaluateStage, compared_metrics
from tasks.mixture import MixtureStage, show_each
from tasks.progress import artifact_key, show_in_prefect
from tasks.publish import stage as publication
from tasks.publish.register import register, show_candidate, show_version
from tasks.publish.registry import Registry
from tasks.retrain.champion import check_rivals_held_out, check_start_is_champion
from tasks.select.stage import SelectStage
from tasks.train import TrainStage, check_epochs, epoch_samples

log = logging.getLogger("kiln")
PUBLISHED = "kiln.model.published"
AWAITING = "kiln.model.awaiting"
#: Status of a report -> name of the final state, of a model that is not the champion.
STATES = {"rejected": "Rejected", "undecided": "Undecided", "awaiting": "Awaiting approval"}
#: Flow and deployment of the form that decides on a candidate; of a team decide/candidate-TEAM.
FORM = "decide/candidate"
NOT_PUBLISHED = ("rejected", "undecided")  # outcomes of the gate
#: Stage name -> function that returns the panels of its artifact.
SHOWS = {
    stage.name: partial(show_each, stage.show)
    for stage in (
        *(DownloadStage, DescribeStage, SelectStage, CaptionStage, EncodeStage, TrainStage),
        *(EvaluateStage, publication.PublishStage),
    )
}

#: Reports of the flows that this process has ended: Prefect's server may be away then.
reports: list[dict[str, Any]] = []


@task(**task_limits.stage_task("download"))
@redacted_errors()
def download(run: Run) -> StageResult:
    """Fetch, check and resize the pictures of the source to image shards."""
    run = run.with_drawn_source()
    if run.sent is not None and run.sent.references:
        plan = run.planned_rows()
        stage = run.stage_of_references(plan)
    else:
        plan = run.plan()
        stage = DownloadStage.of(run.recipe, plan, run.store, run.retry_run)
    assert stage is not None  # the sender's plan has references
    return run.ended(run.build(stage, [plan.artifact]), stage.show)


@task(**task_limits.stage_task("references"))
@redacted_errors()
def references(run: Run, images: StageResult) -> StageResult:
    """Fetch, check and resize the references of the pictures, and pair the two."""
    plan = run.planned_rows()
    stage = run.stage_of_references(plan)
    pictures = own = None
    if stage is not None:
        downloaded = replace(run, sends_references=True).build(stage, [plan.artifact])
        pictures, own = downloaded.load(run.store), stage.plan
    pairs = ReferencesStage(images.load(run.store), plan, pictures, own)
    return run.ended(run.build(pairs), pairs.show)


@task(**task_limits.stage_task("describe"))
@redacted_errors()
def describe(run: Run, images: StageResult) -> StageResult:
    """Compute values of each picture, by the recipe's describers."""
    stage = DescribeStage(run.recipe, images.load(run.store))
    return run.ended(run.build(stage, [images]), stage.show)


@task(**task_limits.stage_task("select"))
@redacted_errors()
def select(run: Run, images: StageResult, described: StageResult | None) -> StageResult:
    """Choose the pictures to train on, by their descriptions and columns of the source."""
    before = (images, described)
    stage = SelectStage(run.recipe, *run.load(*before))
    return run.ended(run.build(stage, before), stage.show)


@task(**task_limits.stage_task("caption"))
@redacted_errors()
def caption(
    run: Run, images: StageResult, selected: StageResult | None, described: StageResult | None
) -> StageResult:
    """Caption the chosen pictures by a model."""
    before = (images, selected, described)
    stage = CaptionStage(run.recipe, *run.load(*before))
    return run.ended(run.build(stage, before), stage.show)


@task(**task_limits.stage_task("encode"))
@redacted_errors()
def encode(
    run: Run,
    images: StageResult,
    selected: StageResult | None = None,
    captions: StageResult | None = None,
    paired: StageResult | None = None,
) -> StageResult:
    """Encode the chosen pictures and their captions with the base's encoders to latent shards."""
    before = (images, selected, captions, paired)
    pictures, *chosen = run.load(*before)
    compared = None
    if run.champion is not None:
        compared = run.champion.compared_pictures(run.store)
    stage = EncodeStage(run.recipe, pictures, run.base, compared, *chosen)
    return run.ended(run.build(stage, before), stage.show)


@task(**task_limits.stage_task("mix"))
@redacted_errors()
def mix(run: Run, stage: StageName, *sources: StageResult | None) -> StageResult:
    """Name the artifacts of the sources of a mixture.

    Args:
        sources: the stage's result of each source, None of a source without the stage.
    """
    named = dict(zip(run.recipe.sources, run.load(*sources), strict=True))
    if stage == "download":  # an evaluation compares with its pictures
        named = {name: named[name] for name in run.recipe.learnt}
    there = {name: artifact for name, artifact in named.items() if artifact is not None}
    return run.ended(run.build(MixtureStage(stage, there)), SHOWS[stage])


@task(**task_limits.stage_task("train"))
@redacted_errors()
def train(run: Run, latents: StageResult) -> StageResult:
    """Fine-tune the base; a retry resumes from the newest checkpoint."""
    encoded = latents.load(run.store)
    stage = TrainStage(run.recipe, encoded, run.base, run.measuring.clip)
    with failing("train"):
        opened = open_latents(encoded.uri)
        check_gate_rules(run.recipe, opened)
        check_epochs(run.recipe.train, epoch_samples(run.recipe, opened))
        is_judged = publication.STAGE in run.stages and run.force is None
        # A retraining has checked it before its download. Weights that are there may be published.
        if is_judged and run.champion is None and run.store.find("train", stage.parts.key) is None:
            check_rivals_held_out(run.recipe, run.store, encoded)
    return run.ended(run.build(stage, [latents]), stage.show)


@task(**task_limits.stage_task("evaluate"))
@redacted_errors()
def evaluate(
    run: Run, images: StageResult, latents: StageResult, trained: StageResult
) -> StageResult:
    """Measure the tuned model against its base, on the same prompts and noise.

    The champion is measured too, where a rule of the gate names it and it was measured otherwise.
    Rounds of new pictures follow while the gate cannot tell, up to `evaluate.max_pictures`.
    """
    before = (images, latents, trained)
    pictures, encoded, tuned = (result.load(run.store) for result in before)
    looks = [EvaluateStage(run.eval_inputs(pictures, encoded, n), tuned) for n in run.rounds]
    last = looks[-1]
    for stage in looks[run.passed_look(looks) :]:
        result = run.build(stage, before)
        measured = result.load(run.store)
        _measure_champion(run, stage, measured, before)
        if stage is last or not run.needs_pictures(stage.data, tuned, measured, before):
            break
        rounds = (stage.data.rounds, last.data.rounds)
        log.info("evaluate: undecided after round %d of %d: drawing new pictures", *rounds)
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


@task(**task_limits.stage_task("publish"))
@redacted_errors()
def publish(
    run: Run,
    images: StageResult,
    latents: StageResult,
    trained: StageResult,
    evaluated: StageResult,
    *chosen: StageResult | None,
) -> StageResult:
    """Publish the model if it passes the gate; a new version becomes champion or candidate.

    Args:
        chosen: results of the stages that only some recipes have, for the report.
    """
    if run.start is not None:
        check_start_is_champion(publication.registry_of(run.recipe), run.start, trained.digest)
    before = (images, latents, trained, evaluated)
    pictures, encoded, tuned, measured = (result.load(run.store) for result in before)
    data = run.eval_inputs(pictures, encoded, measured.summary.get("rounds", 1))
    metrics = run.champion_metrics(data, measured, before[:3])
    lineage = publication.lineage_of(pictures, encoded, tuned, measured)
    stage = publication.PublishStage(
        run.recipe, run.base, tuned, measured, run.force, lineage, metrics
    )
    try:
        result = run.build(stage)
    except publication.Rejected as rejection:
        return _rejected(run, stage, rejection)
    stages = sorted(filter(None, (*before, *chosen)), key=lambda made: STAGES.index(made.stage))
    results = (*stages, result)
    registered = register(run.recipe, run.base, run.store, results, SHOWS, run.start)
    is_new = registered.pop("is_new")  # events are not sent again for a model that is reused
    if "candidate" in registered:
        return _awaiting(run, stage, replace(result, facts=registered), is_new=is_new)
    if is_new:
        emit_published(run.model_name, registered["model"], evaluated.facts.get("metrics", {}))
    version = partial(show_version, run.model_name, registered, run.recipe.stages)
    show_in_prefect(artifact_key(run.model_name, "model"), run.model_name, version)
    return run.ended(replace(result, facts=registered), stage.show)


def _awaiting(
    run: Run, model: publication.PublishStage, result: StageResult, *, is_new: bool
) -> Any:
    """Show a person what to decide on; the task's final state is completed, with its own name."""
    facts = result.facts
    candidate, why = facts["candidate"], facts["why"]
    form = _form(model.registry, candidate["version"])
    if is_new:
        emit_awaiting(run.model_name, facts, form)
    panels = partial(show_candidate, model.registry, candidate, form, run.recipe.stages)
    show_in_prefect(artifact_key(run.model_name, "model"), f"{run.model_name}: {why}", panels)
    run.ended(result, model.show)
    log.info("publish: %s", why)
    return Completed(name=STATES[facts["status"]], message=why, data=result)


def _form(registry: Registry, version: str) -> str | None:
    """Path in the UI of the form that decides on a version, filled in; None without it."""
    if FlowRunContext.get() is None:
        return None
    name = "-".join(filter(None, (FORM, team_of(registry.name))))
    try:
        with get_client(sync_client=True) as client:
            number = client.read_deployment_by_name(name).id
    except ObjectNotFound:  # as on the temporary server of `kiln run`
        return None
    except Exception as error:
        log.warning("publish: the form of %s is not known: %s", name, one_line(error))
        return None
    filled = {"model": registry.name, "version": version, "registry": registry.store.url}
    return f"/deployments/deployment/{number}/run?parameters={quote(json.dumps(filled))}"


def _rejected(run: Run, model: publication.PublishStage, rejection: publication.Rejected) -> Any:
    """Record the verdict with every number; the task's final state is completed, not failed."""
    outcome = rejection.outcome
    verdict = run.build(publication.VerdictStage(model, rejection))
    log.warning("%s", rejection)
    show = publication.VerdictStage.show
    run.show(model.name, f"publish: {outcome} by the gate", lambda: show(verdict.load(run.store)))
    verdicts = rejection.as_json()
    emit_rejected(run.model_name, str(rejection), verdicts, outcome)
    facts = {"gate": verdicts, "verdict": {"key": verdict.key, "uri": verdict.uri}}
    facts |= compared_metrics(rejection.measured)
    result = replace(verdict, stage=model.name, outcome=outcome, facts=facts)
    return Completed(name=STATES[outcome], message=str(rejection), data=result)


def emit_published(model: str, url: str, metrics: dict[str, Any]) -> None:
    """Emit `kiln.model.published`: a new version has become the champion.

    The payload has the version, the model's URL, its report's URL and its metrics.
    """
    url = without_secrets(url)
    version = url.rpartition("/")[2]
    payload = {"version": version, "model": url, "report": f"{url}/{REPORT}", "metrics": metrics}
    _emit(PUBLISHED, model, payload)


def emit_awaiting(model: str, registered: dict[str, Any], form: str | None) -> None:
    """Emit `kiln.model.awaiting`: a person is to promote or reject a candidate.

    The payload has the version, the champion then, the time until which it waits, the URLs of model
    and report, the URLs of the UI's page and form, and the metrics.
    """
    candidate, url = registered["candidate"], without_secrets(registered["model"])
    ui = PREFECT_UI_URL.value() or ""
    payload = {name: candidate[name] for name in ("version", "champion", "until")}
    payload |= {"model": url, "report": f"{url}/{REPORT}", "metrics": registered.get("metrics", {})}
    page = f"{ui}/artifacts/key/{artifact_key(model, 'model')}"
    _emit(AWAITING, model, payload | {"page": page, "form": f"{ui}{form}" if form else page})


def emit_rejected(
    model: str, message: str, verdicts: list[dict[str, Any]], outcome: str = "rejected"
) -> None:
    """Emit `kiln.model.rejected` or `kiln.model.undecided`.

    The payload has the rules that did not pass in words, and all verdicts.
    """
    _emit(f"kiln.model.{outcome}", model, {"message": without_secrets(message), "gate": verdicts})


def _emit(event: str, model: str, payload: dict[str, Any]) -> None:
    """Emit an event of a run. A lost event is a warning: the model is published or measured."""
    if FlowRunContext.get() is None:
        return
    resource = {"prefect.resource.id": f"kiln.model.{model}", "prefect.resource.name": model}
    try:
        if emit_event(event, resource=resource, payload=payload) is None:
            log.warning("the server did not accept the event %s of %s", event, model)
    except Exception as error:
        log.warning("the event %s of %s is lost: %r", event, model, error)


@flow(name="finetune", flow_run_name=task_limits.run_name("finetune {recipe}"))
def finetune(
    recipe: task_limits.RecipeName = "digits",
    overrides: task_limits.Overrides = task_limits.NO_OVERRIDES,
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
    model adds the `champion` and its last move, one that a person decides on the `candidate` and
    `why`, a rejected model the verdicts of the `gate` and the artifact `verdict` with every number.
    """
    flow_process.prepare_process()
    run_id = runtime.flow_run.id
    with redacted_errors():
        checked = load_recipe(recipe, task_limits.revealed(overrides))
        flow_process.name_run(checked.publish.name)
        run = prepare(checked, until=until, run_id=run_id, retry_failed=retry_failed, force=force)
    states = list(islice(stages_of(run), len(stages_until(run.recipe, until))))
    return final_state(report_of([state.result() for state in states]), states[-1])


Tasks = Mapping[StageName, Task[Any, Any]]
TASKS: Tasks = {
    "download": download,
    "describe": describe,
    "select": select,
    "caption": caption,
    "encode": encode,
    "train": train,
    "evaluate": evaluate,
    "publish": publish,
}
#: Stage -> the stages whose results its task gets, None of a stage that the recipe lacks.
INPUTS: Mapping[StageName, Sequence[str]] = {
    "download": (),
    "describe": ("download",),
    "select": ("download", "describe"),
    "caption": ("download", "select", "describe"),
    "encode": ("download", "select", "caption", REFERENCES),
    "train": ("encode",),
    "evaluate": ("download", "encode", "train"),
    "publish": ("download", "encode", "train", "evaluate", *OPTIONAL_STAGES),
}


def stages_of(
    run: Run, tasks: Tasks = TASKS, done: Mapping[StageName, Any] | None = None
) -> Iterator[Any]:
    """The final state of each stage of the recipe, in order.

    Args:
        done: final states of stages that other runs share; their tasks do not run.
    """
    states: dict[Any, Any] = {**(done or {})}
    sources: dict[str, dict[str, Any]] = {name: {} for name in run.recipe.sources}
    for stage in run.recipe.stages:
        if stage not in states and sources and stage in DATA_STAGES:
            states[stage] = _mixed(run, tasks, stage, sources)
        elif stage not in states:
            states[stage] = _run_stage(run, tasks, stage, states)
        yield states[stage]


def _run_stage(run: Run, tasks: Tasks, stage: StageName, states: dict[str, Any]) -> Any:
    """The final state of a stage; before it encodes, that of the references is added."""

    def named(name: str) -> str | None:
        return None if run.source is None else f"{name} {run.source}"

    if stage == "encode" and run.recipe.has_references:
        about = (run, states["download"])
        states[REFERENCES] = run_task(references, *about, name=named(REFERENCES))
    before = map(states.get, INPUTS[stage])
    return run_task(tasks[stage], run, *before, name=named(stage))


def _mixed(run: Run, tasks: Tasks, stage: StageName, sources: Mapping[str, dict[str, Any]]) -> Any:
    """The final state of a stage of a mixture, which is run for one source after another.

    Args:
        sources: final states of each source's stages; those of this stage are added.
    """
    for name, states in sources.items():
        part = run.of_source(name)
        if stage in part.recipe.stages:
            log.info("%s: source %s", stage, name)
            states[stage] = _run_stage(part, tasks, stage, states)
    results = (states.get(stage) for states in sources.values())
    return run_task(mix, run, stage, *results, name=f"mix {stage}")


def final_state(report: dict[str, Any], last: State[Any]) -> Any:
    """A flow's final state: its report, named as in STATES unless the model is the champion.

    Args:
        last: state of the last stage; its message has the verdict.
    """
    reports.append(report)
    if (name := STATES.get(report["status"])) is not None:  # an outcome, not a failure
        return Completed(name=name, message=last.message, data=report)
    return report


def report_of(results: Sequence[StageResult]) -> dict[str, Any]:
    """The report of a run, from the result of each stage, in order."""
    last = results[-1]
    status = "built"
    if last.stage == publication.STAGE:
        status = last.outcome if last.outcome in NOT_PUBLISHED else "published"
    shown = ("key", "uri", "outcome", "seconds")
    stages = {
        result.stage: {name: getattr(result, name) for name in shown}
        for result in results
        if result.outcome not in NOT_PUBLISHED
    }
    report: dict[str, Any] = {"status": status, "stages": stages, "model": None, "metrics": {}}
    for result in results:
        report |= result.facts
    return report
