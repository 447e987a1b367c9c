"""Send a stage to a work pool as a run of the flow `kiln-stage`, and wait for it."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID, uuid4

import httpx
from prefect import Task
from prefect.artifacts import create_link_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.utilities.annotations import quote
from prefect.utilities.urls import url_for

from artifacts.errors import is_passing, retrying
from artifacts.filesystems import REAL, Clock
from artifacts.store import Store
from configs.errors import Away, Failed, Refused
from configs.secrets import one_line
from configs.settings.recipe import Place, PlacedStage, StageName
from flows.task_limits import team_tags
from tasks.build_or_reuse import REUSED
from tasks.code_version import CODE
from tasks.progress import Progress

if TYPE_CHECKING:
    from flows.run import Run

log = logging.getLogger("kiln")

FLOW = "kiln-stage"
#: Crashed runs, none of which came further than those before, that end a try of a stage's task.
MOST_CRASHES = 3
#: Seconds until a crashed run is sent again; doubled after each crash, and varied by up to half.
FIRST_PAUSE = 5.0
POLL_SECONDS = 2.0
#: Errors of a server that may be away or restart; see `_check_away`. The run goes on without it.
AWAY = (httpx.TransportError, PrefectHTTPStatusError)


def deployment_of(pool: str) -> str:
    """Name of the deployment that runs stages on a pool, given as POOL or POOL/QUEUE."""
    return f"{FLOW}/{pool.partition('/')[0]}"


def check_deployments(place: Place, stages: Sequence[StageName]) -> None:
    """Raise Refused if a stage's pool has no deployment on the Prefect server, or of other code."""
    pools = {stage: pool for stage, pool in place.pools().items() if stage in stages}
    if not pools:
        return
    with get_client(sync_client=True) as client:
        for stage, pool in pools.items():
            try:
                deployed = client.read_deployment_by_name(deployment_of(pool)).version
            except ObjectNotFound:
                raise Refused(
                    f"place.{stage}: the Prefect server has no deployment {deployment_of(pool)}: "
                    "run `kiln place RECIPE`"
                ) from None
            if deployed != CODE:
                has = deployed or "of an earlier checkout"
                raise Refused(
                    f"place.{stage}: {deployment_of(pool)} has code {has}, and this is code {CODE} "
                    "(`kiln --version`): run that version, or `kiln place RECIPE` for the code of "
                    "the pool's workers"
                )


def run_task(task: Task[Any, Any], run: Run, *arguments: Any, name: str | None = None) -> Any:
    """Run a stage's task, once Prefect's server answers: it gives each task a slot.

    A task that waits for another run of the stage has no concurrency limit.

    Args:
        run: the first argument of the task. It is quoted: Prefect finds a task's result by the
            identity of its parts, and would draw an edge from each stage that the run names.
        arguments: the others.
        name: the name of the task run; None: the task's.
    """
    if task.task_run_name in run.recipe.place.pools():
        task = task.with_options(tags={"sent"})
    if name is not None:
        task = task.with_options(task_run_name=name)
    return retrying(lambda: task(quote(run), *arguments), passes=is_away, words=_away_in_words)


def is_away(error: BaseException) -> bool:
    """Whether an error comes from a Prefect server that may answer later."""
    cause = _cause(error)
    if isinstance(cause, PrefectHTTPStatusError):
        return is_passing(cause.response.status_code)
    return isinstance(cause, httpx.TransportError)


def _cause(error: BaseException) -> BaseException:
    """The server's error, also if a task did not get its slot because of it."""
    without_slot = isinstance(error, ConcurrencySlotAcquisitionError)
    return error.__cause__ or error if without_slot else error


def _away_in_words(error: Exception) -> str:
    return f"Prefect's server does not answer ({one_line(_cause(error))})"


def send_stage(
    pool: str,
    model: str,
    store: Store,
    stage: PlacedStage,
    parameters: Mapping[str, Any],
    progress: Progress,
    clock: Clock = REAL,
) -> str:
    """Run a stage on its work pool, and wait until it has ended; its outcome there.

    The run is sent again after a crash, such as a preemption. A server that was away may take a
    living run for crashed: while the lock of its artifact has a heartbeat, the artifact is waited
    for. The run is cancelled if the sender ends.

    Args:
        pool: POOL or POOL/QUEUE.
        model: name of the model in training, for the run's name.
        parameters: those of the flow `kiln-stage`.

    Raises:
        Failed: the run failed, or was cancelled or deleted there, or the server refuses it for
            good.
        Away: MOST_CRASHES runs crashed without progress, or the server is away.
    """
    key = parameters["key"]
    crashes = 0
    best = 0.0
    while True:
        reached = _Reached(progress)
        state, name = _run_once(stage, model, pool, parameters, reached)
        where = f"{stage}: run {name} on pool {pool}"
        if state.is_completed():
            return "reused" if state.name == REUSED else "built"
        if not state.is_crashed():
            ended = (state.name or state.type.value).lower()
            raise Failed(f"{where} {ended}: {' '.join((state.message or '').split())}")
        if _built_although_crashed(store, stage, key, where, clock):
            return "built"
        crashes, best = (1, reached.percent) if reached.percent > best else (crashes + 1, best)
        if crashes == MOST_CRASHES:
            raise Away(f"{stage}: {crashes} runs on pool {pool} crashed without progress")
        pause = FIRST_PAUSE * 2 ** (crashes - 1) * random.uniform(0.5, 1.5)
        message = " ".join((state.message or "").split())
        log.warning("%s crashed (%s); sending it again in %.0f s", where, message, pause)
        clock.sleep(pause)


class _Reached:
    """Shows the progress of a sent run as this run's, and remembers how far it came."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.percent = 0.0

    def show(self, percent: float, text: str) -> None:
        self.percent = max(self.percent, percent)
        self.progress(round(percent), 100, text)


def _built_although_crashed(
    store: Store, stage: StageName, key: str, where: str, clock: Clock
) -> bool:
    """Whether the store has the artifact, once nobody builds it."""
    has_warned = False
    while store.is_being_built(stage, key):
        if not has_warned:
            log.warning("%s counts as crashed, but builds on; waiting for its artifact", where)
        has_warned = True
        clock.sleep(POLL_SECONDS)
    return store.find(stage, key) is not None


def _run_once(
    stage: PlacedStage, model: str, pool: str, parameters: Mapping[str, Any], reached: _Reached
) -> tuple[State[Any], str]:
    """The final state and name of a new run of the stage, which is cancelled if the sender ends."""
    with get_client(sync_client=True) as client:
        sent = _start(stage, model, pool, parameters)
        try:
            _tell(client, stage, pool, sent, reached.progress)
            return _wait(client, sent, reached), sent.name
        except ObjectNotFound as error:
            where = f"{stage}: run {sent.name} on pool {pool}"
            raise Failed(f"{where} was deleted: run again") from error
        except BaseException:  # cancelled, interrupted, or too late
            _cancel(client, sent)
            raise


def _start(stage: PlacedStage, model: str, pool: str, parameters: Mapping[str, Any]) -> FlowRun:
    try:
        return cast(
            FlowRun,
            run_deployment(
                deployment_of(pool),
                parameters=dict(parameters),
                timeout=0,
                flow_run_name=f"{stage} of {model}",
                work_queue_name=pool.partition("/")[2] or None,
                tags=team_tags(model),
                idempotency_key=str(uuid4()),  # a request that is repeated makes no second run
            ),
        )
    except ObjectNotFound as error:
        raise Failed(f"{stage}: {deployment_of(pool)} is gone: {one_line(error)}") from error
    except AWAY as error:
        _check_away(stage, error)
        raise Away(f"{stage}: the Prefect server refuses it now: {error}") from error


def _tell(
    client: SyncPrefectClient, stage: PlacedStage, pool: str, sent: FlowRun, progress: Progress
) -> None:
    """Log and link the run; warn if no worker of its pool is online."""
    name = pool.partition("/")[0]
    url = url_for("flow-run", obj_id=sent.id)
    log.info("%s: sent to pool %s%s", stage, pool, f": {url}" if url else "")
    if url is not None:
        try:
            create_link_artifact(url, f"{sent.name} on {pool}", key=f"{progress.key}-run")
        except Exception as error:  # the run counts, not its display
            log.warning("%s: the link to the run is not shown: %s", stage, error)
    try:
        ready = client.read_work_pool(name).status
    except (ObjectNotFound, *AWAY) as error:  # the run is sent, and is waited for
        log.warning("%s: the state of pool %s is unknown: %s", stage, name, one_line(error))
        return
    if ready is not None and ready.value != "READY":
        log.warning("%s: no worker of pool %s is online; waiting for one", stage, name)


def _check_away(stage: str, error: Exception) -> None:
    """Raise Failed for an answer of the server that waiting does not change, such as 401."""
    if not is_away(error):
        raise Failed(f"{stage}: the Prefect server refuses: {one_line(error)}") from error


def _wait(client: SyncPrefectClient, sent: FlowRun, reached: _Reached) -> State[Any]:
    """The final state of a sent run, whose progress is shown as this run's until then."""
    away = False
    while True:
        try:
            state = client.read_flow_run(sent.id).state
            if state is not None and state.is_final():
                return state
            _show(client, sent.id, reached)
            away = False
        except AWAY as error:
            _check_away(reached.progress.stage, error)
            if not away:
                message = "%s: the Prefect server is away: %s"
                log.warning(message, reached.progress.stage, one_line(error))
            away = True
        time.sleep(POLL_SECONDS)


def _show(client: SyncPrefectClient, run: UUID, reached: _Reached) -> None:
    artifacts = client.read_artifacts(
        artifact_filter=filters.ArtifactFilter(
            flow_run_id=filters.ArtifactFilterFlowRunId(any_=[run]),
            type=filters.ArtifactFilterType(any_=["progress"]),
        )
    )
    for artifact in artifacts:
        if artifact.key == f"{reached.progress.key}-progress":
            reached.show(float(str(artifact.data)), artifact.description or "")


def _cancel(client: SyncPrefectClient, sent: FlowRun) -> None:
    try:
        client.set_flow_run_state(sent.id, State(type=StateType.CANCELLING))
    except Exception as error:  # what ended this run is raised
        log.warning("run %s is not cancelled, cancel it: %s", sent.name, one_line(error))
