"""What Prefect is told of a flow and of its tasks: parameters, time limits, retries, concurrency.

Parameters are shown as a form in the UI, and checked in the run. An error in pydantic's own check
would reach people as a traceback with Prefect's words, and Prefect would log all parameters beside
it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from prefect import runtime
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.tasks import exponential_backoff
from pydantic import Field, SecretStr

from artifacts.errors import may_pass
from configs.errors import Refused
from configs.load_recipe import recipe_names
from configs.secrets import hide_secrets, one_line, without_secrets
from configs.settings.recipe import team_of

log = logging.getLogger("kiln")

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
    "references": TaskLimits(retries=5, wait=15, days=14, tag="network"),
    "describe": TaskLimits(retries=3, wait=30, days=14, tag=ACCELERATOR),
    "select": TaskLimits(retries=3, wait=10, days=1, tag="selection"),
    "caption": TaskLimits(retries=3, wait=30, days=14, tag=ACCELERATOR),
    "encode": TaskLimits(retries=3, wait=30, days=14, tag=ACCELERATOR),
    "mix": TaskLimits(retries=3, wait=10, days=1, tag="selection"),
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


NO_OVERRIDES: dict[str, Any] = {}
RecipeName = Annotated[str, Field(examples=recipe_names())]
Overrides = Annotated[dict[str, Any], Field(examples=[{"train.steps": 100}])]


def run_name(words: str) -> Callable[[], str]:
    """The name of a flow's run, such as "finetune {recipe}", without secrets of its parameters."""
    return lambda: without_secrets(words.format(**runtime.flow_run.parameters))


def team_tags(model: str) -> list[str]:
    """The tag of a run for a team's model, such as `team:vision`; none without a team.

    A run must have it from its creation: Prefect's server keeps what its events say of a run.
    """
    team = team_of(model)
    return [f"team:{team}"] if team else []


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
