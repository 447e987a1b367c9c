"""The flow `kiln-stage`: one stage of another run, on the work pool that its recipe names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from prefect.states import Completed

from configs.secrets import redacted_errors
from configs.settings.recipe import PlacedStage, Recipe
from flows.finetune import download, encode, evaluate, report_of
from flows.parameters import revealed
from flows.preflight import prepare
from flows.prepare_process import prepare_process
from flows.retrain import training_task
from flows.run import Run, Sent
from flows.send_stage import FLOW
from flows.task_settings import patiently, without_edges
from flows.task_states import REUSED
from tasks.beam.workers import received_recipe
from tasks.retrain.champion import find_champion
from tasks.stage import StageFailed, StageResult


@flow(name=FLOW)
def run_stage(
    stage: PlacedStage,
    settings: dict[str, Any],
    key: str,
    before: dict[str, str],
    retry_run: str | None = None,
    champion: str | None = None,
) -> dict[str, Any] | State[dict[str, Any]]:
    """Build a stage that another run sent, from the artifacts that it names.

    Args:
        stage: The stage to build.
        settings: The resolved recipe of the sender.
        key: Key of the artifact that the sender expects; another one is not built.
        before: Stage to key of the artifacts that it is built from.
        retry_run: The run that fetches rows with transient failures again; None: no run does.
        champion: Version of the champion that a retraining starts from.

    Returns a report, as `finetune` does. The state's name tells the sender whether the artifact
    was there.
    """
    prepare_process()
    with redacted_errors():
        recipe, sent = received_recipe(revealed(settings)), Sent(stage, key, before)

        def check() -> tuple[Run, list[StageResult]]:
            run = prepare(recipe, only=stage, run_id=runtime.flow_run.id)
            run = replace(_with_champion(run, champion), sent=sent, retry_run=retry_run)
            return run, [] if stage == "download" else run.results_before()

        run, given = patiently(check)
    state = _task(recipe, stage, champion)(without_edges(run), *given)
    report = report_of([*given, state.result()])
    if state.name == REUSED:
        return Completed(name=REUSED, message=state.message, data=report)
    return report


def _task(recipe: Recipe, stage: PlacedStage, champion: str | None) -> Any:
    """The Prefect task that builds the stage."""
    if stage == "train":
        return training_task(recipe, champion)
    return {"download": download, "encode": encode, "evaluate": evaluate}[stage]


def _with_champion(run: Run, version: str | None) -> Run:
    """The run of a retraining. Raises StageFailed if the champion is another one by now."""
    if version is None:
        return run
    champion = find_champion(run.recipe, run.store)
    if champion is None or champion.version != version:
        raise StageFailed(f"retrain: the champion is no longer {version}: run again")
    return replace(run, champion=champion)
