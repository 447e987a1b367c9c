"""Stages as Prefect tasks: cached by content, shown in the UI, retried when that may help."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prefect import task
from prefect.client.schemas.objects import State
from prefect.context import TaskRunContext
from prefect.tasks import Task

from artifacts.store import Artifact, Draft, KeyParts, Store
from tasks.panels import Panel
from tasks.show import show_in_prefect
from tasks.stage import StageResult, TransientError, build_or_reuse

#: Seconds before each further try of a stage whose failure may pass.
RETRY_AFTER = (2, 20)
log = logging.getLogger("kiln")


class StageFailed(RuntimeError):
    """A stage could not use what it was given; what was built before it is kept."""


@dataclass(frozen=True)
class Call:
    """One stage of one run: which artifact is wanted, and how to build it."""

    store: Store
    parts: KeyParts
    build: Callable[[Draft], dict[str, Any]] = field(repr=False)
    parents: dict[str, Artifact]
    present: Artifact | None


def run_stage(
    store: Store,
    parts: KeyParts,
    build: Callable[[Draft], dict[str, Any]],
    parents: dict[str, Artifact],
    show: Callable[[Artifact], list[Panel]],
) -> tuple[StageResult, Artifact]:
    """Run a stage as a task and show it in the UI; reuse its artifact if that is there and whole.

    Prefect's own record of the task is refreshed when the artifact is gone, so that it is never
    offered without one; and a server with an empty database finds the artifact all the same.
    """
    present = store.find(parts.stage, parts.key)
    call = Call(store, parts, build, parents, present)
    stage_task = _as_task(parts.stage).with_options(refresh_cache=present is None)
    try:
        state: Any = stage_task(call, return_state=True)
        result = StageResult(**state.result())
    except ValueError as error:
        # Wrong input that shows only now: earlier stages have been built, and stay.
        raise StageFailed(f"{parts.stage}: {error}") from error
    if state.name == "Cached":
        result = StageResult(**{**result.as_dict(), "outcome": "reused", "seconds": 0.0})
    artifact = store.load(result.stage, result.key)
    assert artifact is not None, "just built or found"
    heading = f"{result.stage}: {result.outcome}"
    show_in_prefect(result.stage, heading, lambda: show(artifact))
    log.info("%s: %s in %.1f s (%s)", result.stage, result.outcome, result.seconds, result.key[:12])
    return result, artifact


def _cache_key(context: TaskRunContext, parameters: dict[str, Any]) -> str:
    call: Call = parameters["call"]
    place = f"{call.store.url_of('')}|{call.parts.stage}|{call.parts.key}"
    return hashlib.sha256(place.encode()).hexdigest()


def _may_pass(stage_task: Any, run: Any, state: State[Any]) -> bool:
    """Whether a failure is worth another try."""
    try:
        state.result()
    except (TransientError, ConnectionError, TimeoutError):
        return True
    except BaseException:
        return False
    return False


def _as_task(name: str) -> Task[..., Any]:
    as_task = task(
        name=name,
        task_run_name=name,
        cache_key_fn=_cache_key,
        persist_result=True,
        result_serializer="json",
        retries=len(RETRY_AFTER),
        retry_delay_seconds=list(RETRY_AFTER),
        retry_condition_fn=_may_pass,
    )
    return as_task(_build)


def _build(call: Call) -> dict[str, Any]:
    return build_or_reuse(
        call.store, call.parts, call.build, parents=call.parents, present=call.present
    ).as_dict()
