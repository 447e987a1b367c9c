"""Report a stage's progress to the terminal and, in a run, to a Prefect progress artifact.

Panels are shown in the Prefect UI as one markdown artifact. Bytes and durations have words.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import UUID

from runtimes.torch_models.gpu_specs import GIB
from tasks.panels import Links, Panel, to_markdown

log = logging.getLogger("kiln")
#: (flow run, task run or None, key) -> artifact that this process has created there.
_artifacts: dict[tuple[Any, Any, str], UUID] = {}


def artifact_key(*names: str) -> str:
    """Names as the key of an artifact in Prefect: lower-case letters, digits and dashes.

    Two dashes stand for the slash after a team: `vision--digits-train`.
    """
    parts = "-".join(names).lower().split("/")
    words = (re.sub(r"[^a-z0-9]+", "-", part).strip("-") for part in parts)
    return "--".join(filter(None, words))


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


Report = Callable[[int, int, str], None]  # done, total, text
#: Callbacks (stage, done, total, text); `kiln run` adds its progress bar.
listeners: list[Callable[[str, int, int, str], None]] = []


class Progress:
    """A callback (done, total, text), cheap enough for every step.

    Args:
        model: name of the model in training, which separates recipes in Prefect.
    """

    EVERY_SECONDS = 1.0

    def __init__(self, stage: str, model: str = "") -> None:
        self.stage = stage
        self.key = artifact_key(model, stage)  # of the stage's artifact in Prefect
        self._next = 0.0
        self._artifact: UUID | None = None
        self._shown = -1.0

    def __call__(self, done: int, total: int, text: str = "") -> None:
        now = time.monotonic()
        if now < self._next and done < total:
            return
        self._next = now + self.EVERY_SECONDS
        for listener in listeners:
            listener(self.stage, done, total, text)
        self._show_in_prefect(100.0 * done / max(total, 1), text)

    def _show_in_prefect(self, percent: float, text: str) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact
        from prefect.context import FlowRunContext

        if FlowRunContext.get() is None or percent == self._shown:
            return
        self._shown = percent
        try:
            if self._artifact is None:
                made = create_progress_artifact(
                    percent, key=f"{self.key}-progress", description=text or self.stage
                )
                self._artifact = made if isinstance(made, UUID) else None
            else:
                update_progress_artifact(self._artifact, percent, description=text or self.stage)
        except Exception as error:  # an unreachable server must not stop a training run
            log.warning("%s: progress is not shown in Prefect: %s", self.stage, error)
            self._next = time.monotonic() + 30.0


def bytes_in_words(size: float) -> str:
    """A number of bytes, such as `12 B`, `139 MB` or `3.1 GB`."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = 0
    while size >= 999.5 and power < 4:
        size /= 1000
        power += 1
    digits = f"{size:.1f}".removesuffix(".0") if size < 99.95 else f"{size:,.0f}"
    return f"{digits} {units[power]}"


def gib(size: float, digits: int = 2) -> str:
    """Bytes of a device's memory, whose makers count in powers of two."""
    return f"{size / GIB:.{digits}f} GiB"


def seconds_in_words(seconds: float) -> str:
    """Seconds in the largest unit of which there are two or more."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def hours_in_words(hours: float) -> str:
    """Hours in words; minutes for a short training, which is not done in 0.0 hours."""
    return f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"
