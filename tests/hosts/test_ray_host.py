"""Which processes an actor of engine `ray` kills on its host."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator

import psutil
import pytest

from tasks.hosts.ray_host import MARK, Host, _kill

Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that a kill was asked for; none is killed, of this machine's."""
    found = list[int]()
    monkeypatch.setattr(psutil.Process, "kill", lambda process: found.append(process.pid))
    monkeypatch.setattr("tasks.hosts.ray_host.END_SECONDS", 0.2)
    return found


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process with a mark."""
    started = list[subprocess.Popen[bytes]]()

    def call(mark: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: mark}))
        return started[-1]

    yield call
    for process in started:
        process.kill()
        process.wait()


def test_a_host_that_has_started_nothing_kills_nothing(start: Start, asked: list[int]) -> None:
    start("a-1-0")
    Host("torch").kill()
    assert asked == []


def test_a_host_kills_its_own_ranks_alone(start: Start, asked: list[int]) -> None:
    for other in ("a-1-10", "a-2-1", "aa-1-1"):
        start(other)
    ours = start("a-1-1")
    host = Host("torch")
    host._mark = "a-1-1"
    host.kill()
    assert set(asked) == {ours.pid}


def test_a_process_without_a_mark_is_nobody_s(start: Start, asked: list[int]) -> None:
    marked = start("a-1-0")
    _kill(lambda mark: mark in ("", "a-1-0"))
    assert set(asked) == {marked.pid}
