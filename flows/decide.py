"""The flow `decide`: a person promotes or rejects a candidate, by a form in the Prefect UI.

The candidate waits in the registry, and no flow run waits for it.
"""

from __future__ import annotations

import json
import logging
from functools import partial
from typing import Annotated, Any, Literal

from prefect import flow
from prefect.states import Completed
from pydantic import Field

from configs.secrets import redacted_errors
from flows import flow_process, task_limits
from flows.finetune import emit_published, emit_rejected
from tasks.build_or_reuse import METRICS
from tasks.progress import artifact_key, show_in_prefect
from tasks.publish.champion_alias import CANDIDATE
from tasks.publish.register import approve, show_candidate
from tasks.publish.registry import Registry

log = logging.getLogger("kiln")


@flow(name="decide", flow_run_name=task_limits.run_name("{decision} {model} {version}"))
def decide(
    model: str,
    decision: Literal["promote", "reject"],
    by: Annotated[str, Field(pattern=r"\S")],
    version: str = CANDIDATE,
    reason: str = "",
    registry: str = "store/registry",
) -> Any:
    """Promote or reject the candidate of a model; its history has who, when and why.

    Args:
        model: Name of the model (publish.name).
        decision: promote makes it the champion; its recipe does not offer a rejected one again.
        by: Who decides.
        version: The candidate's version, such as v2. Another candidate is refused.
        reason: Why; a rejection needs one.
        registry: Folder or URL of the registry.
    """
    flow_process.prepare_process()
    with redacted_errors():
        flow_process.name_run(model)
        return _decide(Registry(registry, model), decision, version, by, reason)


def _decide(registry: Registry, decision: str, version: str, by: str, reason: str) -> Any:
    if decision == "promote":
        version = approve(registry, version, by, reason).name
    else:
        version = registry.reject(version, by, reason)
    history = registry.history()
    candidate = history.candidate(version)
    assert candidate is not None
    message = str(history.outcome(candidate))
    log.info("%s: %s", registry.name, message)
    if decision == "promote":
        metrics = json.loads(registry.fs.cat_file(f"{registry.root}/{version}/{METRICS}"))
        emit_published(registry.name, registry.url(version), metrics["metrics"])
    else:
        emit_rejected(registry.name, message, [])
    key = artifact_key(registry.name, "model")
    show_in_prefect(key, message, partial(show_candidate, registry, candidate, None))
    name = {"promote": "Promoted", "reject": "Rejected"}[decision]
    return Completed(name=name, message=message, data={"version": version, "by": by})
