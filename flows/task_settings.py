"""Prefect task settings, run records and final states of the stages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed
from prefect.tasks import exponential_backoff

from artifacts.artifact_key import KeyParts
from artifacts.run_records import record_run
from artifacts.store import Artifact, Store
from tasks.build_or_reuse import StageResult, TransientError, storing
from tasks.panels import Panel
from tasks.progress import Progress
from tasks.publish.stage import STAGE, Rejected, show_verdicts
from tasks.show_in_prefect import artifact_key, show_in_prefect

DAY = 86400.0  # seconds
log = logging.getLogger("kiln")


class Limits(NamedTuple):
    """Retries, time and concurrency of a stage's task."""

    retries: int
    wait: float  # seconds before the first retry; each further wait is twice as long
    days: float  # time limit of one attempt
    tag: str  # limits concurrency on the server


LIMITS = {
    "compare": Limits(retries=5, wait=10, days=1, tag="registry"),
    "download": Limits(retries=5, wait=15, days=14, tag="network"),
    "encode": Limits(retries=3, wait=30, days=14, tag="accelerator"),
    "train": Limits(retries=5, wait=60, days=30, tag="accelerator"),
    "evaluate": Limits(retries=3, wait=30, days=7, tag="accelerator"),
    "publish": Limits(retries=5, wait=10, days=1, tag="registry"),
    "conclude": Limits(retries=5, wait=10, days=1, tag="registry"),
    "generate": Limits(retries=3, wait=10, days=1, tag="accelerator"),
}


def may_pass(task: Any, run: Any, state: State[Any]) -> bool:
    """Whether a failed task should be retried."""
    try:
        state.result()
    except (TransientError, ConnectionError, TimeoutError):
        return True
    except BaseException:
        return False
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
        "retry_condition_fn": may_pass,
        "retry_jitter_factor": 0.5,
    }


def begin(
    store: Store, run_id: str, parts: KeyParts, model: str, facts: dict[str, Any]
) -> Progress:
    """Record, before a stage is built, that a run needs it: `kiln gc` keeps what runs need.

    Args:
        facts: other facts of the run, for its record.

    Returns the progress of building the stage.
    """
    with storing(store):
        record_run(store, run_id, {**facts, "stages": {parts.stage: {"key": parts.key}}})
    return Progress(parts.stage, model)


def ended(
    store: Store, model: str, result: StageResult, show: Callable[[Artifact], list[Panel]]
) -> Any:
    """Show a stage's artifact in the UI, and return the final state of its task.

    Prefect passes the result to a task that receives the state, and draws an edge.

    Args:
        model: name of the model in training, which separates recipes in the UI.
        show: returns the panels of the stage's artifact.
    """
    heading = f"{result.stage}: {result.outcome}"

    def panels() -> list[Panel]:  # loads the artifact where an error is only logged
        return show(result.load(store))

    show_in_prefect(artifact_key(model, result.stage), heading, panels)
    log.info("%s: %s in %.1f s (%s)", result.stage, result.outcome, result.seconds, result.key[:12])
    return Completed(name="Reused" if result.outcome == "reused" else None, data=result)


def rejected(model: str, parts: KeyParts, rejection: Rejected) -> Any:
    """Show the gate's verdicts, and return the final state: a completed task, not a failed one."""
    log.warning("%s", rejection)
    panels = partial(show_verdicts, rejection.verdicts)
    show_in_prefect(artifact_key(model, STAGE), f"{STAGE}: rejected by the gate", panels)
    verdicts = [vars(verdict) for verdict in rejection.verdicts]
    result = StageResult(STAGE, parts.key, "", "", "rejected", 0.0, {"gate": verdicts})
    return Completed(name="Rejected", message=str(rejection), data=result)
