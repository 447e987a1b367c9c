"""Events of several threads, on a pipe that nobody reads any more."""

import os
from typing import Any

import pytest

from runtimes.process.job import EVENT_FD, Events


def test_another_thread_may_find_the_pipe_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    monkeypatch.setenv(EVENT_FD, str(write_end))
    events = Events()

    class Other:
        """A lock that another emitter had before."""

        def __enter__(self) -> None:
            monkeypatch.setattr(events, "_lock", lock)
            events.emit("progress")

        def __exit__(self, *_: Any) -> None:
            pass

    lock = events._lock
    monkeypatch.setattr(events, "_lock", Other())
    events.emit("warning", message="both")
    assert events._stream is None
