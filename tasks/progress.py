"""Report a stage's progress to the terminal and, in a run, to a Prefect progress artifact."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from uuid import UUID

from tasks.show_in_prefect import artifact_key

log = logging.getLogger("kiln")

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
