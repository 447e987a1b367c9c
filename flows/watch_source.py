"""The flow `watch-source`: emit an event when the files of a recipe's source have changed."""

from __future__ import annotations

import logging
from typing import Any

import httpx
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.events.schemas.events import Event
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Completed

from artifacts.store import Store
from configs.errors import Away
from configs.load_recipe import load_recipe
from configs.secrets import one_line, redacted_errors
from flows.checks import writable_store
from flows.prefect_run import (
    NO_OVERRIDES,
    Overrides,
    RecipeName,
    prepare_process,
    revealed,
    run_name,
)
from tasks.publish.stage import registry_of
from tasks.retrain.changes import EVENT, is_retraining, last_stamp, remember, source_resource, stamp
from tasks.stage import storing

log = logging.getLogger("kiln")


@flow(name="watch-source", flow_run_name=run_name("watch {recipe}"))
def watch_source(recipe: RecipeName = "digits", overrides: Overrides = NO_OVERRIDES) -> Any:
    """Compare size and etag or time of the source's files with the last run.

    A change, and the first run, emit the event `kiln.source.changed` of the resource
    `kiln.source.<model>`. While a retraining of the model runs, the event waits for a later run:
    each event starts a run, which would wait as a process.

    Args:
        recipe: Name or path of a recipe.
        overrides: Dotted settings to change.

    Returns {"source": resource of the event, "changed": whether it was emitted, "waits": whether a
    change waits for the end of a retraining}.
    """
    prepare_process()
    with redacted_errors():
        checked = load_recipe(recipe, revealed(overrides))
        resource = source_resource(checked.publish.name)
        registry = registry_of(checked)
        with storing(Store(checked.store)):
            seen = stamp(checked.source)
            if last_stamp(registry) == seen:
                report = {"source": resource, "changed": False, "waits": False}
                return Completed(name="Unchanged", data=report)
            if is_retraining(registry):  # asked after the stamp: a later one reads the change
                log.info("watch: %s has changed, and a retraining runs: waiting", resource)
                report = {"source": resource, "changed": False, "waits": True}
                return Completed(name="Waiting", data=report)
            writable_store(checked)  # else each run would announce the change
            _announce(resource, seen)
            remember(registry, seen)  # an event that was refused is emitted again
    log.info("watch: %s has changed", resource)
    return {"source": resource, "changed": True, "waits": False}


def _announce(resource: str, found: str) -> None:
    """Send the event of a change. Raises Away unless the server has accepted it."""
    given = {"event": EVENT, "resource": {"prefect.resource.id": resource}}
    event = Event.model_validate({**given, "payload": {"stamp": found}})
    try:
        # Prefect's `emit_event` leaves it to a thread, and nobody knows whether it arrived.
        with get_client(sync_client=True) as client:
            client._client.post("/events", json=[event.model_dump(mode="json")])
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        raise Away(
            f"watch: the server did not accept the event {EVENT}: {one_line(error)}"
        ) from error
