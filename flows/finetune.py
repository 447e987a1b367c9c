"""The flow `finetune`: from a source of images to a published, evaluated model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from prefect import flow, runtime, task
from prefect.states import Completed
from prefect.tasks import exponential_backoff

import tasks.download
import tasks.encode
import tasks.evaluate
import tasks.publish
import tasks.train
from artifacts.latents import open_latents
from configs.load import load_recipe
from configs.schema import STAGES, StageName
from flows.logs import log_to_prefect
from flows.parameters import NO_OVERRIDES, Overrides, RecipeName
from flows.preflight import Run, check_gate, prepare
from flows.stages import DAY, EVERY_STAGE, ended, refused
from tasks.show import artifact_key, show_in_prefect
from tasks.stage import StageResult, build_or_reuse, failing


@task(
    task_run_name="download",
    retries=5,
    retry_delay_seconds=exponential_backoff(15),
    timeout_seconds=14 * DAY,
    tags={"network"},
    **EVERY_STAGE,
)
def download(run: Run) -> StageResult:
    """Fetch, check and resize every picture of the source: image shards."""
    plan = tasks.download.plan(run.recipe)
    parts = tasks.download.key_parts(run.recipe, plan)
    build = partial(tasks.download.build, run.recipe, plan, progress=run.begin(parts))
    result = build_or_reuse(run.store, parts, build, parents={})
    return ended(run.store, run.model_name, result, tasks.download.show)


@task(
    task_run_name="encode",
    retries=3,
    retry_delay_seconds=exponential_backoff(30),
    timeout_seconds=14 * DAY,
    tags={"accelerator"},
    **EVERY_STAGE,
)
def encode(run: Run, images: StageResult) -> StageResult:
    """Encode every picture and caption by the base's own encoders: latent shards."""
    pictures = images.load(run.store)
    parts = tasks.encode.key_parts(run.recipe, pictures, run.base, run.vae)
    build = partial(
        tasks.encode.build, run.recipe, pictures, run.base, run.vae, progress=run.begin(parts)
    )
    result = build_or_reuse(run.store, parts, build, parents={"images": pictures})
    return ended(run.store, run.model_name, result, tasks.encode.show)


@task(
    task_run_name="train",
    retries=5,
    retry_delay_seconds=exponential_backoff(60),
    timeout_seconds=30 * DAY,
    tags={"accelerator"},
    **EVERY_STAGE,
)
def train(run: Run, latents: StageResult) -> StageResult:
    """Fine-tune the base; a further try goes on from the newest checkpoint."""
    encoded = latents.load(run.store)
    with failing("train"):
        check_gate(run.recipe, open_latents(encoded.uri))
    prompts = tasks.evaluate.sample_prompts(run.recipe)
    score = tasks.evaluate.SampleScorer(run.recipe.evaluate.judges, run.clip, prompts)
    parts = tasks.train.key_parts(run.recipe, encoded, run.base)
    build = partial(
        tasks.train.build,
        *(run.recipe, encoded, run.base, run.vae, prompts, score),
        progress=run.begin(parts),
    )
    result = build_or_reuse(run.store, parts, build, parents={"latents": encoded})
    return ended(run.store, run.model_name, result, tasks.train.show)


@task(
    task_run_name="evaluate",
    retries=3,
    retry_delay_seconds=exponential_backoff(30),
    timeout_seconds=7 * DAY,
    tags={"accelerator"},
    **EVERY_STAGE,
)
def evaluate(
    run: Run, images: StageResult, latents: StageResult, trained: StageResult
) -> StageResult:
    """Measure the tuned model against its base, on the same prompts and noise."""
    pictures, encoded, tuned = (one.load(run.store) for one in (images, latents, trained))
    given = run.eval_inputs(pictures, encoded)
    parts = tasks.evaluate.key_parts(given, tuned)
    build = partial(tasks.evaluate.build, given, tuned, progress=run.begin(parts))
    parents = {"images": pictures, "latents": encoded, "model": tuned}
    result = build_or_reuse(run.store, parts, build, parents=parents)
    metrics = result.load(run.store).summary["metrics"]
    result = replace(result, facts={"metrics": metrics})
    return ended(run.store, run.model_name, result, tasks.evaluate.show)


@task(
    task_run_name="publish",
    retries=5,
    retry_delay_seconds=exponential_backoff(10),
    timeout_seconds=DAY,
    tags={"registry"},
    **EVERY_STAGE,
)
def publish(
    run: Run,
    images: StageResult,
    latents: StageResult,
    trained: StageResult,
    evaluated: StageResult,
) -> StageResult:
    """Put the model into the registry, its champion if it is new there, unless the gate refuses."""
    before = (images, latents, trained, evaluated)
    pictures, encoded, tuned, measured = (one.load(run.store) for one in before)
    parts = tasks.publish.key_parts(run.recipe, tuned, measured, run.base)
    given = run.eval_inputs(pictures, encoded)
    champion_metrics = partial(tasks.evaluate.metrics_of_published, given, measured)
    lineage = tasks.publish.lineage_of(pictures, encoded, tuned, measured)
    build = partial(
        tasks.publish.build,
        *(run.recipe, tuned, measured, lineage, run.base, run.vae, champion_metrics),
        progress=run.begin(parts),
    )
    parents = {"model": tuned, "evaluation": measured}
    try:
        result = build_or_reuse(run.store, parts, build, parents=parents)
    except tasks.publish.Rejected as rejection:
        return refused(run.model_name, parts, rejection)
    registered = tasks.publish.register(run.recipe, run.base, run.store, (*before, result))
    version = partial(tasks.publish.show_version, registered)
    show_in_prefect(artifact_key(run.model_name, "model"), run.model_name, version)
    return ended(run.store, run.model_name, replace(result, facts=registered), tasks.publish.show)


@flow(name="finetune", flow_run_name="finetune {recipe}")
def finetune(
    recipe: RecipeName = "digits",
    overrides: Overrides = NO_OVERRIDES,
    until: StageName = "publish",
) -> Any:
    """Download, encode, train, evaluate, publish: each reused if its inputs have not changed.

    Args:
        recipe: Name of a recipe, or path of one (`kiln recipes` lists them).
        overrides: Dotted settings to change, such as {"train.steps": 100}.
        until: The last stage to run.

    Returns a report (as `kiln run --json` prints it): status, stages, model, metrics; if it is
    published, the version that is `champion` and why; if it is rejected, the `gate`'s verdicts.
    """
    log_to_prefect()
    run = prepare(load_recipe(recipe, overrides), until=until, run_id=runtime.flow_run.id)
    states = list(islice(_stages(run), 1 + STAGES.index(until)))
    report = _report([state.result() for state in states])
    if report["status"] == "rejected":  # a measured outcome, not a failure
        return Completed(name="Rejected", message=states[-1].message, data=report)
    return report


def _stages(run: Run) -> Iterator[Any]:
    """Every stage in its turn, given what those before it have made."""
    yield (images := download(run))
    yield (latents := encode(run, images))
    yield (trained := train(run, latents))
    yield (evaluated := evaluate(run, images, latents, trained))
    yield publish(run, images, latents, trained, evaluated)


def _report(results: Sequence[StageResult]) -> dict[str, Any]:
    last, status = results[-1], "built"
    if last.stage == tasks.publish.STAGE:
        status = "rejected" if last.outcome == "rejected" else "published"
    stages = {
        one.stage: {
            "key": one.key,
            "uri": one.uri,
            "outcome": one.outcome,
            "seconds": one.seconds,
        }
        for one in results
        if one.outcome != "rejected"
    }
    report: dict[str, Any] = {"status": status, "stages": stages, "model": None, "metrics": {}}
    for one in results:
        report |= one.facts
    return report
