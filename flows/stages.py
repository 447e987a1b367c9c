"""How a stage ends in Prefect, and when it is tried again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from artifacts.gc import record_run
from artifacts.store import Artifact, KeyParts, Store
from tasks.panels import Panel
from tasks.progress import Progress
from tasks.publish import STAGE, Rejected, show_verdicts
from tasks.show import artifact_key, show_in_prefect
from tasks.stage import StageResult, TransientError, storing

DAY = 86400.0  # seconds
log = logging.getLogger("kiln")


def may_pass(task: Any, run: Any, state: State[Any]) -> bool:
    """Whether a failure is worth another try."""
    try:
        state.result()
    except (TransientError, ConnectionError, TimeoutError):
        return True
    except BaseException:
        return False
    return False


#: Of each task: the store alone says what is reused, and waits between tries vary by half.
EVERY_STAGE: dict[str, Any] = {
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
    """Show a stage's artifact in the UI; the state in which its task ends.

    A task that is given the state gets the result, and Prefect draws an edge.

    Args:
        model: Name of the model that is made, by which recipes are told apart.
        show: What a stage shows of its artifact.
    """
    heading = f"{result.stage}: {result.outcome}"
    panels = partial(show, result.load(store))
    show_in_prefect(artifact_key(model, result.stage), heading, panels)
    log.info("%s: %s in %.1f s (%s)", result.stage, result.outcome, result.seconds, result.key[:12])
    return Completed(name="Reused" if result.outcome == "reused" else None, data=result)


def refused(model: str, parts: KeyParts, rejection: Rejected) -> Any:
    """Show the gate's verdicts; the state in which `publish` ends: an outcome, not a failure."""
    log.warning("%s", rejection)
    panels = partial(show_verdicts, rejection.verdicts)
    show_in_prefect(artifact_key(model, STAGE), f"{STAGE}: refused by the gate", panels)
    verdicts = [vars(verdict) for verdict in rejection.verdicts]
    result = StageResult(STAGE, parts.key, "", "", "rejected", 0.0, {"gate": verdicts})
    return Completed(name="Rejected", message=str(rejection), data=result)
