"""A flow's process and tasks in Prefect: logs, states, settings, parameters, events, cancellation.

A Prefect worker ends the cancelled runs of deployments. `kiln run` has no worker, and a worker may
be killed or miss the cancellation: then the flow's process ends itself. Each log line of Kilnworks
goes to the Prefect run of its thread, and all lines are without secrets. The process is prepared
for its logs, an interruption, and the loss of its console.

Automations react to the events of a model: published, or rejected by the gate. Parameters are shown
as a form in the UI, and checked in the run. An error in pydantic's own check would reach people as
a traceback with Prefect's words, and Prefect would log all parameters beside it.

A stage's task has retries, a time limit and a limit of concurrency. A `Builder` builds all stages
in the same way: the begin is recorded for `kiln gc`, the end is shown in Prefect's UI.
"""

from __future__ import annotations

import _thread
import contextvars
import logging
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, NamedTuple

from prefect import runtime
from prefect.cache_policies import NO_CACHE
from prefect.client.base import ServerType
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext, TaskRunContext
from prefect.events import emit_event
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound, TerminationSignal
from prefect.logging.handlers import APILogHandler
from prefect.states import Cancelled, Completed
from prefect.tasks import exponential_backoff
from prefect.utilities.annotations import quote
from pydantic import Field, SecretStr
from rich.console import Console

from artifacts.errors import may_pass
from artifacts.gc import record_run
from artifacts.store import Artifact, KeyParts, Store
from configs.errors import Refused, UserError
from configs.load_recipe import recipe_names
from configs.secrets import hide_secrets, one_line, redact_logs, without_secrets
from configs.settings.recipe import STAGES
from tasks.evaluate.stage import compared_metrics
from tasks.panels import Links, Panel
from tasks.progress import Progress, artifact_key, show_in_prefect, stage_links
from tasks.publish.stage import STAGE, Rejected, show_verdicts
from tasks.run_job import stopping
from tasks.stage import REPORT, Stage, StageResult, build_or_reuse, storing

log = logging.getLogger("kiln")

#: Seconds between two looks at the run's state.
POLL_SECONDS = 10.0
#: Seconds that a worker has: it sends SIGTERM, and SIGKILL after 30 s.
WORKER_SECONDS = 120.0


def end_run_if_cancelled() -> None:
    """Watch the state of this thread's flow run in the background, until the run ends.

    Once it is cancelled, the process receives SIGTERM, as from a worker. A server that ends
    with the run is not asked: nobody sees its UI.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    if threading.current_thread() is not threading.main_thread():  # signals reach that thread alone
        return
    if context.client.server_type is ServerType.EPHEMERAL:
        return
    inherited = contextvars.copy_context()  # has the server's address, and the run for log lines
    threading.Thread(
        target=inherited.run, args=(_watch, context.flow_run), name="cancellation", daemon=True
    ).start()


def _watch(run: FlowRun) -> None:
    # Not the client of the run's own thread, whose connections that thread closes.
    with get_client(httpx_settings={}, sync_client=True) as client:
        seen: float | None = None  # seconds of this clock: the server's may differ by minutes
        while not _has_ended(run):
            time.sleep(POLL_SECONDS)
            try:
                state = client.read_flow_run(run.id).state
                if state is None or not (state.is_cancelling() or state.is_cancelled()):
                    seen = None
                    continue
                seen = time.monotonic() if seen is None else seen
                if _is_due(run, seen) and _ended(client, run, state):
                    return
            except ObjectNotFound:  # the run was deleted
                return
            except Exception as error:
                log.debug("the state of the run is unknown: %s", error)


def _is_due(run: FlowRun, seen: float) -> bool:
    """Whether no worker has ended a run since its cancellation was seen."""
    return run.deployment_id is None or time.monotonic() - seen > WORKER_SECONDS


def _ended(client: SyncPrefectClient, run: FlowRun, state: State) -> bool:
    """End the process of a cancelled run, unless a worker or a user does so."""
    if _is_ending(run):
        return False
    if not state.is_final():
        state = Cancelled(message="cancelled; the process ends by itself")
        client.set_flow_run_state(run.id, state, force=True)
        if _is_ending(run):  # since the request, which may have taken minutes
            return False
    log.warning("the run is cancelled in Prefect: it ends")
    run.state = state  # Prefect's engine replaces a state that is not final by Crashed
    os.kill(os.getpid(), signal.SIGTERM)
    return True


def _is_ending(run: FlowRun) -> bool:
    return stopping.is_set() or _has_ended(run)


def _has_ended(run: FlowRun) -> bool:
    return run.state is not None and run.state.is_final()


def log_to_prefect() -> None:
    """Add Prefect's handler to the `kiln` logger, once, and redact the lines of all loggers.

    Prefect logs wrong input as one line: its message says what to do.

    PREFECT_LOGGING_EXTRA_LOGGERS would add it without a level, and warn about other threads.
    """
    redact_logs()
    logger = logging.getLogger("kiln")
    if not any(isinstance(handler, APILogHandler) for handler in logger.handlers):
        handler = APILogHandler()
        handler.addFilter(_in_a_run)
        logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_without_traceback)


@contextmanager
def each_line_once() -> Iterator[None]:
    """Log equal lines once, such as the warnings of a sweep's trials."""
    logger = logging.getLogger("kiln")
    seen = set[str]()

    def is_new(record: logging.LogRecord) -> bool:
        count = len(seen)
        seen.add(record.getMessage())
        return len(seen) > count

    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Take the traceback of wrong input out of a record, and keep that of a bug."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, UserError) and _is_wrong_input(error):
        record.exc_info = None
    return True


def _is_wrong_input(error: Exception) -> bool:
    return any(isinstance(cause, ValueError) for cause in (error, error.__cause__))


def _in_a_run(record: logging.LogRecord) -> bool:
    """Whether the thread belongs to a run; a heartbeat's does not."""
    return FlowRunContext.get() is not None or TaskRunContext.get() is not None


#: Seconds until an ignored interruption is raised again: the callback that ignored it has ended.
AGAIN_SECONDS = 0.1


def prepare_process() -> None:
    """Send log lines to Prefect; raise interruptions again that Python ignored; outlive a console.

    The handlers of SIGTERM (Prefect's) and SIGINT raise an exception wherever the main thread is.
    Python ignores all exceptions of finalizers and weak references' callbacks: the run would go on.

    The console of a run is a pipe to its worker. Once a worker is killed, rich would end the thread
    that logs, or the run.

    A run that is cancelled in Prefect ends, even if no worker ends it.
    """
    log_to_prefect()
    end_run_if_cancelled()
    Console.on_broken_pipe = _go_on_silently  # type: ignore[assignment,method-assign]
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _raise_again


def _raise_again(ignored: Any) -> None:
    numbers = {TerminationSignal: signal.SIGTERM, KeyboardInterrupt: signal.SIGINT}
    if (number := numbers.get(ignored.exc_type)) is None:
        sys.__unraisablehook__(ignored)
        return

    def send() -> None:
        time.sleep(AGAIN_SECONDS)
        os.kill(os.getpid(), number)

    # The interrupted code may hold the locks of `threading`.
    _thread.start_new_thread(send, ())


def _go_on_silently(console: Console) -> None:
    """Discard what is printed from now on, by others too; Prefect's server still gets the log."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), console.file.fileno())


PUBLISHED = "kiln.model.published"
REJECTED = "kiln.model.rejected"


def model_resource(model: str) -> str:
    """Id of a model's resource, `kiln.model.<publish.name>`."""
    return f"kiln.model.{model}"


def put_automation(client: SyncPrefectClient, automation: AutomationCore) -> str:
    """`created`, or `updated` if the server has the automation; it stays disabled if it was."""
    same = client.read_automations_by_name(automation.name)
    if not same:
        client.create_automation(automation)
        return "created"
    automation.enabled = same[0].enabled
    client.update_automation(same[0].id, automation)
    return "updated"


def emit_published(model: str, url: str, metrics: dict[str, Any]) -> None:
    """Emit `kiln.model.published`: a new version has become the champion.

    The payload has the version, the model's URL, its report's URL and its metrics.
    """
    url = without_secrets(url)
    version = url.rpartition("/")[2]
    payload = {"version": version, "model": url, "report": f"{url}/{REPORT}", "metrics": metrics}
    _emit(PUBLISHED, model, payload)


def emit_rejected(model: str, message: str, verdicts: list[dict[str, Any]]) -> None:
    """Emit `kiln.model.rejected`; the payload has the failed rules in words, and all verdicts."""
    _emit(REJECTED, model, {"message": without_secrets(message), "gate": verdicts})


def _emit(event: str, model: str, payload: dict[str, Any]) -> None:
    """Emit an event of a run. A lost event is a warning: the model is published or measured."""
    if FlowRunContext.get() is None:
        return
    resource = {"prefect.resource.id": model_resource(model), "prefect.resource.name": model}
    try:
        if emit_event(event, resource=resource, payload=payload) is None:
            log.warning("the server did not accept the event %s of %s", event, model)
    except Exception as error:
        log.warning("the event %s of %s is lost: %r", event, model, error)


NO_OVERRIDES: dict[str, Any] = {}
RecipeName = Annotated[str, Field(examples=recipe_names())]
Overrides = Annotated[dict[str, Any], Field(examples=[{"train.steps": 100}])]


def run_name(words: str) -> Callable[[], str]:
    """The name of a flow's run, such as "finetune {recipe}", without secrets of its parameters."""
    return lambda: without_secrets(words.format(**runtime.flow_run.parameters))


def revealed(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with their secrets. Raises Refused for a secret that Prefect has stored."""
    if hide_secrets(settings) != settings:
        raise Refused(
            "a secret in a parameter is refused, since Prefect stores it: write it into a recipe "
            "file, or start the run by `kiln run`; and replace the secret"
        )
    values: dict[str, Any] = _reveal(settings)
    return values


def _reveal(settings: Any) -> Any:
    if isinstance(settings, dict):
        return {key: _reveal(value) for key, value in settings.items()}
    if isinstance(settings, list):
        return [_reveal(value) for value in settings]
    return settings.get_secret_value() if isinstance(settings, SecretStr) else settings


DAY = 86400.0  # seconds
#: Tag of the tasks that use an accelerator; `kiln place --accelerators` limits it.
ACCELERATOR = "accelerator"


class TaskLimits(NamedTuple):
    """Retries, time and concurrency of a stage's task."""

    retries: int
    wait: float  # seconds before the first retry; each further wait is twice as long
    days: float  # time limit of one attempt
    tag: str  # limits concurrency on the server


LIMITS = {
    "compare": TaskLimits(retries=5, wait=10, days=1, tag="registry"),
    "download": TaskLimits(retries=5, wait=15, days=14, tag="network"),
    "encode": TaskLimits(retries=3, wait=30, days=14, tag=ACCELERATOR),
    "train": TaskLimits(retries=5, wait=60, days=30, tag=ACCELERATOR),
    "evaluate": TaskLimits(retries=3, wait=30, days=7, tag=ACCELERATOR),
    "publish": TaskLimits(retries=5, wait=10, days=1, tag="registry"),
    "conclude": TaskLimits(retries=5, wait=10, days=1, tag="registry"),
    "generate": TaskLimits(retries=3, wait=10, days=1, tag=ACCELERATOR),
}


def should_retry(task: Any, run: Any, state: State[Any]) -> bool:
    """Whether Prefect tries a failed task again: a log line says why, and when.

    Prefect asks only while a try is left. A terminal does not show its own line, a worker does.
    """
    try:
        state.result()
    except BaseException as error:
        if not may_pass(error):
            return False
        if logging.getLogger("prefect.task_runs").isEnabledFor(logging.INFO):
            return True
        waits = task.retry_delay_seconds
        seconds = waits[min(run.run_count, len(waits)) - 1]
        message = "%s; the next try of %s is in about %g s"
        log.warning(message, one_line(error), run.name, seconds)
        return True
    return False


def stage_task(name: str) -> dict[str, Any]:
    """Arguments of `@task` for a task of LIMITS.

    The store alone decides on reuse, and jitter separates the retries of parallel runs.
    """
    limits = LIMITS[name]
    return {
        "task_run_name": name,
        "retries": limits.retries,
        "retry_delay_seconds": exponential_backoff(limits.wait),
        "timeout_seconds": limits.days * DAY,
        "tags": {limits.tag},
        "cache_policy": NO_CACHE,
        "retry_condition_fn": should_retry,
        "retry_jitter_factor": 0.5,
    }


def without_edges(run: Any) -> Any:
    """Wrap a run for a task argument, so that Prefect draws no edges; the task gets the plain run.

    Prefect finds a task's result by the identity of its parts, such as a stage's name, and would
    draw an edge from each stage that the run names.
    """
    return quote(run)


#: Name of the completed state of a stage whose artifact was in the store.
REUSED = "Reused"


class Builder(ABC):
    """What builds the stages of a flow run, each in the same way."""

    store: Store
    id: str  # of the flow run

    @property
    @abstractmethod
    def model_name(self) -> str:
        """Name of the model, which separates recipes in Prefect."""

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What the record of the run has beside its stages."""

    def begin(self, parts: KeyParts) -> Progress:
        """Record, before a stage is built, that the run needs it: `kiln gc` keeps what runs need.

        Returns the progress of building the stage.
        """
        with storing(self.store):
            record_run(self.store, self.id, {**self.facts, "stages": {parts.stage: [parts.key]}})
        return Progress(parts.stage, self.model_name)

    def send(
        self, parts: KeyParts, progress: Progress, before: Sequence[StageResult | Artifact]
    ) -> Callable[[], str] | None:
        """A call that lets a run elsewhere build a stage; None: it is built here.

        Args:
            before: what the stage is built from: results of the stages before, or the plan.
        """
        return None

    def build(
        self, stage: Stage, before: Sequence[StageResult | Artifact] | None = None
    ) -> StageResult:
        """Build a stage's artifact, here or elsewhere, or reuse it, and check it.

        Args:
            before: as of `send`; None: it is built here.

        Raises:
            Failed: as `build_or_reuse` and the stage's `check`.
        """
        parts = stage.parts
        progress = self.begin(parts)
        result = build_or_reuse(
            *(self.store, parts, partial(stage.build, progress=progress)),
            parents=stage.parents,
            help_builder=stage.helper(self.store, progress),
            versions=stage.versions,
            send=None if before is None else self.send(parts, progress, before),
        )
        summary = result.load(self.store).summary
        stage.check(summary)
        return replace(result, facts=stage.facts(summary))

    def ended(self, result: StageResult, show: Callable[[Artifact], list[Panel]]) -> Any:
        """Show a stage's artifact in the UI, and return the final state of its task.

        Prefect passes the result to a task that receives the state, and draws an edge.

        Args:
            show: returns the panels of the stage's artifact.
        """
        heading = f"{result.stage}: {result.outcome}"
        model = self.model_name

        def panels() -> list[Panel]:  # loads the artifact where an error is only logged
            return [*show(result.load(self.store)), *_earlier_stages(model, result.stage)]

        show_in_prefect(artifact_key(model, result.stage), heading, panels)
        text = "%s: %s in %.1f s (%s)"
        log.info(text, result.stage, result.outcome, result.seconds, result.key[:12])
        return Completed(name=REUSED if result.outcome == "reused" else None, data=result)


def rejected(model: str, verdict: StageResult, rejection: Rejected) -> Any:
    """Show the gate's verdicts and emit the event; the final state is completed, not failed.

    Args:
        verdict: the artifact with every number.
    """
    log.warning("%s", rejection)

    def panels() -> list[Panel]:
        shown = show_verdicts(rejection.verdicts, verdict.uri)
        return [*shown, *_earlier_stages(model, STAGE)]

    show_in_prefect(artifact_key(model, STAGE), f"{STAGE}: rejected by the gate", panels)
    verdicts = rejection.as_json()
    emit_rejected(model, str(rejection), verdicts)
    facts = {"gate": verdicts, "verdict": {"key": verdict.key, "uri": verdict.uri}}
    facts |= compared_metrics(rejection.measured)
    result = replace(verdict, stage=STAGE, outcome="rejected", facts=facts)
    return Completed(name="Rejected", message=str(rejection), data=result)


def _earlier_stages(model: str, stage: str) -> list[Links]:
    """Links to the artifacts of the stages before; the first stage and others have none."""
    earlier = STAGES[: STAGES.index(stage)] if stage in STAGES else ()
    return [stage_links(model, earlier)] if earlier else []
