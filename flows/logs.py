"""Send Kilnworks' log lines to the Prefect run of their thread, all lines without secrets."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging.handlers import APILogHandler

from configs.secrets import redact_logs
from tasks.stage import is_ours


def log_to_prefect() -> None:
    """Add Prefect's handler to the `kiln` logger, once, and redact the lines of all loggers.

    Prefect logs wrong input as one line: its message says what to do.

    PREFECT_LOGGING_EXTRA_LOGGERS would add it without a level, and warn about other threads.
    """
    redact_logs()
    logger = logging.getLogger("kiln")
    if not any(isinstance(handler, APILogHandler) for handler in logger.handlers):
        handler = APILogHandler()
        handler.addFilter(_in_a_run)
        logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_without_traceback)


@contextmanager
def each_line_once() -> Iterator[None]:
    """Log equal lines once, such as the warnings of a sweep's trials."""
    logger, seen = logging.getLogger("kiln"), set[str]()

    def is_new(record: logging.LogRecord) -> bool:
        count = len(seen)
        seen.add(record.getMessage())
        return len(seen) > count

    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Take the traceback of wrong input out of a record, and keep that of a bug."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, Exception) and is_ours(error) and _is_wrong_input(error):
        record.exc_info = None
    return True


def _is_wrong_input(error: Exception) -> bool:
    return any(isinstance(one, ValueError) for one in (error, error.__cause__))


def _in_a_run(record: logging.LogRecord) -> bool:
    """Whether the thread belongs to a run; a heartbeat's does not."""
    return FlowRunContext.get() is not None or TaskRunContext.get() is not None
