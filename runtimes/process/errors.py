"""Errors and warnings of a process of a job, as events for the stage that waits.

Exit codes: 2 wrong input; 1 other errors.
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any

from artifacts.errors import is_outage, target_of
from configs.errors import Away, Refused, UserError
from runtimes.process import launcher
from runtimes.process.job import Events


class _ToEvents(logging.Handler):
    """Sends warnings of the logger `kiln` to the stage as events."""

    def __init__(self, events: Events) -> None:
        super().__init__(logging.WARNING)
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        self._events.emit("warning", message=record.getMessage())


def warnings_to(events: Events) -> None:
    """Send warnings of the logger `kiln` to the stage."""
    logging.getLogger("kiln").addHandler(_ToEvents(events))


def report_error(events: Events, error: Exception) -> int:
    """Report an error, and return the exit code. Rank 0 prints the root cause for all ranks."""
    if isinstance(error, Refused):
        return fail(events, str(error), 2, wrong_input=True)
    if isinstance(error, OSError):
        facts = {"errno": error.errno, "file": target_of(error), "away": is_outage(error)}
        return fail(events, str(error), 1, **facts)
    if isinstance(error, UserError):
        return fail(events, str(error), 1, away=isinstance(error, Away))
    message = f"{type(error).__name__}: {error}"
    if " out of memory" in message:  # PyTorch's words for CUDA and torch_npu's for NPUs
        message = f"the device is too small: set what `kiln plan --gpu` advises ({message})"
    trace = "".join(traceback.format_exception(error))
    return fail(events, message, 1, away=is_outage(error), traceback=trace)


def fail(events: Events, message: str, code: int, **facts: Any) -> int:
    """Report an error once and return `code`.

    Args:
        facts: fields of the event, see job.py.
    """
    unset = {"wrong_input": False, "errno": None, "file": None, "away": False, "traceback": ""}
    fields = unset | facts
    events.emit("error", message=message, **fields)
    if not launcher.is_follower():
        print(f"{fields['traceback']}error: {message}", file=sys.stderr)
    return code
