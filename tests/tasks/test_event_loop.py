"""What the downloads of one process share."""

import logging
import os

import pytest

from tasks.download import fetch_with_retries


def test_a_core_that_is_another_jobs_has_no_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})  # as a scheduler gives
    _, decoders = fetch_with_retries._of_process.__wrapped__()
    assert decoders._max_workers == 4


@pytest.mark.parametrize(("files", "connections"), [(160, 32), (20, 1), (4096, 256)])
def test_connections_are_as_many_as_the_process_may_open_files_for(
    files: int, connections: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fetch_with_retries, "raise_open_file_limit", lambda: files)
    with caplog.at_level(logging.WARNING, "kiln"):
        assert fetch_with_retries._connections.__wrapped__(256)._value == connections
    said = f"download: {connections} connections instead of download.max_connections, 256: "
    warned = [
        record for record in caplog.messages if record.startswith(said) and "ulimit" in record
    ]
    assert len(warned) == (connections < 256)
