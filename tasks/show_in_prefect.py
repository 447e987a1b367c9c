"""Show panels in the Prefect UI, as one markdown artifact."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import UUID

from tasks.panels import Links, Panel, to_markdown

log = logging.getLogger("kiln")
#: (flow run, task run or None, key) -> artifact that this process has created there.
_artifacts: dict[tuple[Any, Any, str], UUID] = {}


def artifact_key(*names: str) -> str:
    """Names as the key of an artifact in Prefect: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(names).lower()).strip("-")


def stage_links(model: str, stages: Iterable[str]) -> Links:
    """Links to the newest artifact of each of a model's stages."""
    return Links("Stages", {name: f"/artifacts/key/{artifact_key(model, name)}" for name in stages})


def show_in_prefect(key: str, heading: str, panels: Callable[[], Sequence[Panel]]) -> None:
    """Create the artifact `key` in a run; a failure is only logged.

    A task, or the flow outside tasks, that shows a key again replaces the text of its artifact: the
    database does not grow with the number of steps or trials.
    """
    from prefect.artifacts import create_markdown_artifact
    from prefect.context import FlowRunContext, TaskRunContext

    if (flow := FlowRunContext.get()) is None:
        return
    try:
        task = TaskRunContext.get()
        place = (flow.flow_run and flow.flow_run.id, task and task.task_run.id, key)
        text = to_markdown(heading, panels())
        if place in _artifacts and _replace(_artifacts[place], text):
            return
        made = create_markdown_artifact(markdown=text, key=key)
        if isinstance(made, UUID):
            _artifacts[place] = made
    except Exception as error:  # such as an unreachable server or a damaged picture
        log.warning("%s is not shown in Prefect: %s", key, error)


def _replace(artifact: UUID, text: str) -> bool:
    """Replace the text of an artifact; False if it was deleted."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError

    with get_client(sync_client=True) as client:
        try:
            # `client.update_artifact` would also store the text in an event.
            client.request(
                "PATCH", "/artifacts/{id}", path_params={"id": artifact}, json={"data": text}
            )
        except PrefectHTTPStatusError as error:
            if error.response.status_code != 404:
                raise
            return False
    return True
