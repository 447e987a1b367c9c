"""Send Kilnworks' log lines to the Prefect run of their thread, all lines without secrets."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging.handlers import APILogHandler

from configs.redact_errors_and_logs import redact_logs


def log_to_prefect() -> None:
    """Add Prefect's handler to the `kiln` logger, once, and redact the lines of all loggers.

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


def _in_a_run(record: logging.LogRecord) -> bool:
    """Whether the thread belongs to a run; a heartbeat's does not."""
    return FlowRunContext.get() is not None or TaskRunContext.get() is not None
