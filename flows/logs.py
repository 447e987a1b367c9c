"""Send Kilnworks' log lines to the Prefect run that they belong to."""

from __future__ import annotations

import logging

from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging.handlers import APILogHandler


def log_to_prefect() -> None:
    """Attach Prefect's handler to the `kiln` logger, once, and let it follow the run's thread."""
    logger = logging.getLogger("kiln")
    if not any(isinstance(handler, APILogHandler) for handler in logger.handlers):
        handler = APILogHandler()
        handler.addFilter(_in_a_run)
        logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)


def _in_a_run(record: logging.LogRecord) -> bool:
    """Lines from threads that know no run (a heartbeat, say) stay local."""
    return FlowRunContext.get() is not None or TaskRunContext.get() is not None
