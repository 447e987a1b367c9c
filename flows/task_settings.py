"""Prefect task settings of the stages: retries, time limits, concurrency."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.tasks import exponential_backoff
from prefect.utilities.annotations import quote

from artifacts.models import ModelAway
from artifacts.remote_stores import CacheFull, is_outage
from configs.load_recipe import RecipeError
from configs.secrets import one_line
from tasks.stage import TransientError

log = logging.getLogger("kiln")
DAY = 86400.0  # seconds
#: Seconds before each further attempt of what is read outside the tasks.
PAUSES = (10.0, 60.0, 300.0)
T = TypeVar("T")
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


def may_pass(error: BaseException) -> bool:
    """Whether another try may succeed."""
    cause = error.__cause__ if isinstance(error, RecipeError) else None  # see writable_store
    return isinstance(error, TransientError | ModelAway | CacheFull) or is_outage(cause or error)


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


def patiently(
    work: Callable[[], T],
    passes: Callable[[BaseException], bool] = may_pass,
    words: Callable[[Exception], str] = one_line,
) -> T:
    """What a flow itself does, once the remote store answers: a flow has no retries.

    The stages before it may have taken days.

    Args:
        passes: whether another attempt may succeed after an error.
        words: an error in the log.
    """
    for seconds in PAUSES:
        try:
            return work()
        except Exception as error:
            if not passes(error):
                raise
            log.warning("%s; next attempt in %g seconds", words(error), seconds)
            time.sleep(seconds)
    return work()


def without_edges(run: Any) -> Any:
    """A run as the argument of a task; the task receives the run itself.

    Prefect finds a task's result by the identity of its parts, such as a stage's name, and would
    draw an edge from each stage that the run names.
    """
    return quote(run)
