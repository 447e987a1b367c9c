"""Prefect's log of a run that failed by wrong input is one line; a bug keeps its traceback."""

import logging
from collections.abc import Iterator
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.logging.loggers import flow_run_logger, task_run_logger

from configs.errors import Failed, Refused
from flows.flow_process import log_to_prefect
from tasks.build_or_reuse import failing

RUN: Any = SimpleNamespace(
    **{"name": "fox", "id": "1", "flow_run_id": "2", "task_key": "encode"},
    **{"deployment_id": None, "parent_task_run_id": None},
)


@pytest.fixture(params=[flow_run_logger, task_run_logger])
def logged(request: pytest.FixtureRequest) -> Iterator[tuple[Any, StringIO]]:
    """Prefect's logger of a flow or a task, and what it writes."""
    adapter, stream = request.param(RUN), StringIO()
    handler, factory = logging.StreamHandler(stream), logging.getLogRecordFactory()
    own = logging.getLogger("kiln")
    before, level = list(own.handlers), adapter.logger.level
    adapter.logger.addHandler(handler)
    adapter.logger.setLevel(logging.INFO)  # the runs of other tests in this process silence Prefect
    log_to_prefect()
    yield adapter, stream
    logging.setLogRecordFactory(factory)
    adapter.logger.removeHandler(handler)
    adapter.logger.setLevel(level)
    own.handlers[:] = before


def test_wrong_input_is_one_line(logged: tuple[Any, StringIO]) -> None:
    adapter, stream = logged
    error = Refused("no such folder")
    try:
        raise error
    except ValueError as found:
        adapter.exception("Encountered exception: %r", found)
    assert stream.getvalue() == f"Encountered exception: {error!r}\n"


def test_wrong_input_of_a_stage_is_one_line(logged: tuple[Any, StringIO]) -> None:
    adapter, stream = logged
    try:
        with failing("train"):
            raise Refused("no such layer")
    except Failed:
        adapter.exception("failed")
    assert stream.getvalue() == "failed\n"


@pytest.mark.parametrize("error", [ValueError("of a library"), Failed("by a bug")])
def test_other_errors_keep_their_traceback(logged: tuple[Any, StringIO], error: Exception) -> None:
    adapter, stream = logged
    try:
        raise error
    except Exception:
        adapter.exception("failed")
    assert "Traceback" in stream.getvalue() and str(error) in stream.getvalue()
