"""Show panels in the Prefect UI, as one markdown artifact."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence

from tasks.panels import Panel, to_markdown

log = logging.getLogger("kiln")


def artifact_key(*names: str) -> str:
    """Names as the key of an artifact in Prefect: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(names).lower()).strip("-")


def show_in_prefect(key: str, heading: str, panels: Callable[[], Sequence[Panel]]) -> None:
    """Create the artifact `key` in a run; a failure is only logged."""
    from prefect.artifacts import create_markdown_artifact
    from prefect.context import FlowRunContext

    if FlowRunContext.get() is None:
        return
    try:
        create_markdown_artifact(markdown=to_markdown(heading, panels()), key=key)
    except Exception as error:  # such as an unreachable server or a damaged picture
        log.warning("%s is not shown in Prefect: %s", key, error)
