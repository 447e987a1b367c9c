"""Work pools: deploy the flow `kiln-stage` on them, and run a stage that was sent.

The flow is one stage of another run, on the work pool that its recipe names. `kiln place` deploys
it on a recipe's work pools, and sets limits there.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from prefect import flow, runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State, StateType
from prefect.events import EventTrigger, Posture
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound
from prefect.states import Completed
from prefect.utilities.annotations import quote
from prefect.utilities.callables import parameter_schema

from artifacts.errors import retrying
from configs.errors import Failed, Refused
from configs.load_recipe import CHECKOUT
from configs.secrets import redacted_errors
from configs.settings.recipe import Place, PlacedStage
from flows import flow_process
from flows.finetune import INPUTS, TASKS, report_of
from flows.retrain import training_task
from flows.run import Run, Sent, prepare
from flows.run_in_terminal import check_server, lasting_server
from flows.send_stage import FLOW
from flows.task_limits import ACCELERATOR, revealed
from tasks.beam.workers import received_recipe
from tasks.build_or_reuse import REUSED, StageResult
from tasks.code_version import CODE, code_digest
from tasks.publish.stage import registry_of
from tasks.retrain.champion import Champion, find_champion


@flow(name=FLOW)
def run_stage(
    stage: PlacedStage,
    settings: dict[str, Any],
    key: str,
    before: dict[str, str],
    retry_run: str | None = None,
    champion: str | None = None,
    source: str | None = None,
    rounds: int = 1,
    references: bool = False,
) -> dict[str, Any] | State[dict[str, Any]]:
    """Build a stage that another run sent, from the artifacts that it names.

    Args:
        stage: The stage to build.
        settings: The resolved recipe of the sender.
        key: Key of the artifact that the sender expects; another one is not built.
        before: Stage to key of the artifacts that it is built from.
        retry_run: The run that fetches rows with transient failures again; None: no run does.
        champion: Version of the champion that a retraining starts from.
        source: Name of the source of a mixture that the recipe is of.
        rounds: Rounds of pictures of an evaluation.
        references: Whether a download is that of the references.

    Returns a report, as `finetune` does. The state's name tells the sender whether the artifact
    was there.
    """
    flow_process.prepare_process()
    if (deployed := runtime.deployment.version) not in (None, CODE):
        raise Failed(
            f"{stage}: the worker has code {CODE}, and its deployment code {deployed}: run "
            "`kiln place RECIPE` after an upgrade"
        )
    with redacted_errors():
        recipe = received_recipe(revealed(settings))

        def prepared() -> tuple[Run, list[StageResult]]:
            run = prepare(recipe, only=stage, run_id=runtime.flow_run.id)
            sent = Sent(stage, key, before, rounds, references)
            start = _champion(run, champion, source)
            run = replace(run, champion=start, sent=sent, retry_run=retry_run)
            return run, [] if stage == "download" else run.results_before()

        run, results = retrying(prepared)
    task: Any = training_task(run) if stage == "train" else TASKS[stage]
    made = {result.stage: result for result in results}
    state = task(quote(run), *map(made.get, INPUTS[stage]))
    report = report_of([*results, state.result()])
    if state.name == REUSED:
        return Completed(name=REUSED, message=state.message, data=report)
    return report


def _champion(run: Run, version: str | None, source: str | None) -> Champion | None:
    """The champion of a retraining, of a mixture with the data of one source.

    Raises Failed if the champion is another one by now.
    """
    if version is None:
        return None
    champion = find_champion(registry_of(run.recipe), run.store)
    if champion is None or champion.version != version:
        raise Failed(f"retrain: the champion is no longer {version}: run again")
    return champion if source is None else champion.of_source(source)


LOST = "kiln: lost stages"
#: Seconds between the heartbeats of a stage's run (Prefect's least), and the silence of a lost run.
HEARTBEAT = 30
SILENCE = 90


def deploy_stages(place: Place, folder: str | None, accelerators: int | None) -> None:
    """Let each work pool that a recipe names run its stages; what exists is updated.

    Args:
        folder: folder of Kilnworks on the workers' machines; default: that of this checkout.
        accelerators: stages that may use an accelerator at the same time, over all runs.

    Raises:
        Refused: the recipe names no pool, or one that the server does not have.
        Refused: no lasting Prefect server is configured, or it does not answer.
    """
    pools = sorted({pool.partition("/")[0] for pool in place.pools().values()})
    if not pools:
        raise Refused("place: no stage has a work pool, such as place.train=gpu")
    check_server(lasting_server("place: work pools need"))
    with get_client(sync_client=True) as client:
        for pool in pools:
            try:
                client.read_work_pool(pool)
            except ObjectNotFound:
                raise Refused(
                    f"place: the Prefect server has no work pool {pool}: run "
                    f"`prefect work-pool create {pool} --type process`, or docker or kubernetes"
                ) from None
        for pool in pools:
            _deploy(client, pool, folder or str(CHECKOUT))
            print(f"deployed: {FLOW}/{pool} (prefect worker start --pool {pool})")
        _detect_lost(client)
        print(f"automation: {LOST}")
        if accelerators is not None:
            client.create_concurrency_limit(ACCELERATOR, accelerators)
            print(f"limit: {accelerators} stages with an accelerator at a time")


def _deploy(client: SyncPrefectClient, pool: str, folder: str) -> None:
    schema = parameter_schema(run_stage)
    client.create_deployment(
        client.create_flow(run_stage),
        name=pool,
        version=code_digest(Path(folder)) if Path(folder).is_dir() else CODE,
        work_pool_name=pool,
        entrypoint="flows/work_pools.py:run_stage",
        pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": folder}}],
        parameter_openapi_schema=schema.model_dump_for_openapi(),
        description="Stages that other runs send (place). See docs/orchestration.md.",
        job_variables={
            "env": {
                "NO_ALBUMENTATIONS_UPDATE": "1",
                "DO_NOT_TRACK": "1",
                "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT),
            }
        },
    )


def _detect_lost(client: SyncPrefectClient) -> None:
    """Let the server mark a run crashed whose machine is gone: its sender then sends another."""
    made = AutomationCore(
        name=LOST,
        description="A run of the flow `kiln-stage` without a heartbeat has crashed.",
        trigger=EventTrigger(
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=ResourceSpecification(
                {"prefect.resource.role": "flow", "prefect.resource.name": FLOW}
            ),
            after={"prefect.flow-run.heartbeat"},
            # Any event of the run: a run that is scheduled again may wait long for a machine.
            expect={"prefect.flow-run.*"},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=SILENCE),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message="no heartbeat")],
    )
    put_automation(client, made)


def put_automation(client: SyncPrefectClient, automation: AutomationCore) -> str:
    """`created`, or `updated` if the server has the automation; it stays disabled if it was."""
    same = client.read_automations_by_name(automation.name)
    if not same:
        client.create_automation(automation)
        return "created"
    automation.enabled = same[0].enabled
    client.update_automation(same[0].id, automation)
    return "updated"
