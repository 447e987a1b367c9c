"""A Dask worker that closes during a heartbeat, which the scheduler answers late."""

import asyncio
import logging
from collections.abc import Iterator

import pytest
from distributed import Scheduler, Worker
from engines import LateHeartbeats

SECONDS = 60.0  # for a busy machine


@pytest.fixture
def worker_log() -> Iterator[logging.Logger]:
    """Dask's log of workers, as pytest's handler of the root logger reads it."""
    found = logging.getLogger("distributed.worker")
    level, propagate = found.level, found.propagate
    found.propagate = True
    yield found
    found.setLevel(level)
    found.propagate = propagate


def test_a_closing_dask_worker_prints_no_traceback(
    worker_log: logging.Logger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    late = LateHeartbeats(monkeypatch)
    of_this_host = {"host": "127.0.0.1", "dashboard": False}

    async def close_during_a_heartbeat() -> None:
        async with Scheduler(port=0, **of_this_host) as scheduler:
            preload = ["tasks.beam.pipeline"]
            async with Worker(scheduler.address, nthreads=1, preload=preload, **of_this_host):
                assert await asyncio.to_thread(late.asked.wait, SECONDS)

    asyncio.run(close_during_a_heartbeat())
    told = [record for record in caplog.records if record.name == worker_log.name]
    assert told and not [one.getMessage() for one in told if one.levelno >= logging.WARNING]
