"""A stage's task: its begin, recorded for `kiln gc`, and its final state, shown in Prefect's UI."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from prefect.states import Completed

from artifacts.gc import record_run
from artifacts.store import Artifact, KeyParts, Store
from configs.settings.recipe import STAGES
from flows.model_events import emit_rejected
from tasks.panels import Links, Panel
from tasks.progress import Progress, artifact_key, show_in_prefect, stage_links
from tasks.publish.stage import STAGE, Rejected, show_verdicts
from tasks.stage import StageResult, storing

log = logging.getLogger("kiln")
#: Name of the completed state of a stage whose artifact was in the store.
REUSED = "Reused"


def begin(
    store: Store, run_id: str, parts: KeyParts, model: str, facts: dict[str, Any]
) -> Progress:
    """Record, before a stage is built, that a run needs it: `kiln gc` keeps what runs need.

    Args:
        facts: other facts of the run, for its record.

    Returns the progress of building the stage.
    """
    with storing(store):
        record_run(store, run_id, {**facts, "stages": {parts.stage: [parts.key]}})
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
        return [*show(result.load(store)), *_earlier_stages(model, result.stage)]

    show_in_prefect(artifact_key(model, result.stage), heading, panels)
    log.info("%s: %s in %.1f s (%s)", result.stage, result.outcome, result.seconds, result.key[:12])
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


def compared_metrics(measured: Mapping[str, Any]) -> dict[str, Any]:
    """What a run reports of metrics.json: the metrics of all models, and their differences."""
    return {name: measured[name] for name in ("metrics", "differences") if name in measured}


def _earlier_stages(model: str, stage: str) -> list[Links]:
    """Links to the artifacts of the stages before; the first stage and others have none."""
    earlier = STAGES[: STAGES.index(stage)] if stage in STAGES else ()
    return [stage_links(model, earlier)] if earlier else []
