"""What the downloads of one process share."""

import os

import pytest

from tasks.download import event_loop


def test_a_core_that_is_another_jobs_has_no_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})  # as a scheduler gives
    _, decoders = event_loop._of_process.__wrapped__()
    assert decoders._max_workers == 4
