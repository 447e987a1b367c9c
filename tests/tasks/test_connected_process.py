"""A process that sockets connect answers at each of them, and leaves no orphan."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kiln_command import ROOT, is_running
from waiting import wait_until

from configs.errors import Away
from tasks import child_process
from tasks.child_process import ConnectedProcess, ProcessLost

TESTS = str(Path(__file__).parents[1])


def start(*arguments: str) -> ConnectedProcess:
    given = {"PYTHONPATH": os.pathsep.join([str(ROOT), TESTS])}
    return ConnectedProcess("the echo", "echo_process", arguments, sockets=2, environment=given)


@pytest.fixture
def echo() -> Iterator[ConnectedProcess]:
    process = start("one", "two")
    yield process
    process.close()


def test_each_socket_has_its_own_answers(echo: ConnectedProcess) -> None:
    echo.send(b"first", 0)
    assert echo.ask(b"second", 1) == b"second one two"
    assert echo.receive(0) == b"first one two"


def test_the_error_of_a_dead_process_has_the_last_line_of_its_log(echo: ConnectedProcess) -> None:
    for line in (b"log starting", b"log the driver is gone"):
        echo.ask(line)
    os.kill(echo.pid, signal.SIGKILL)
    for number in (0, 1, 0):
        with pytest.raises(ProcessLost, match=r"^the echo ended with -9: the driver is gone$"):
            echo.ask(b"first", number)
    assert issubclass(ProcessLost, Away)


def test_a_closed_process_ends_by_itself(echo: ConnectedProcess) -> None:
    assert echo.close() == 0


def test_a_process_that_does_not_end_is_killed(
    echo: ConnectedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "END_SECONDS", 0.1)
    os.kill(echo.pid, signal.SIGSTOP)
    assert echo.close() == -signal.SIGKILL


def test_a_collected_process_has_ended() -> None:
    process = start()
    pid = process.pid
    del process
    assert not is_running(pid)


def test_the_process_ends_when_its_parent_is_killed() -> None:
    script = (
        "import time; from tasks.child_process import ConnectedProcess;"
        "process = ConnectedProcess('the echo', 'echo_process', sockets=2);"
        "print(process.pid, flush=True); time.sleep(600)"
    )
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), TESTS])}
    python = [sys.executable, "-c", script]
    with subprocess.Popen(python, env=paths, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    wait_until(lambda: not is_running(child), 30)
