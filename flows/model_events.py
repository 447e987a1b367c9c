"""Prefect events of a model: published, or rejected by the gate. Automations react to them."""

from __future__ import annotations

import logging
from typing import Any

from prefect.context import FlowRunContext
from prefect.events import emit_event

from configs.secrets import without_secrets
from tasks.stage import REPORT

log = logging.getLogger("kiln")
PUBLISHED = "kiln.model.published"
REJECTED = "kiln.model.rejected"


def model_resource(model: str) -> str:
    """Id of a model's resource, `kiln.model.<publish.name>`."""
    return f"kiln.model.{model}"


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
    """Emit an event of a run. A lost one is a warning: the model is published or measured."""
    if FlowRunContext.get() is None:
        return
    resource = {"prefect.resource.id": model_resource(model), "prefect.resource.name": model}
    try:
        if emit_event(event, resource=resource, payload=payload) is None:
            log.warning("the server did not accept the event %s of %s", event, model)
    except Exception as error:
        log.warning("the event %s of %s is lost: %r", event, model, error)
