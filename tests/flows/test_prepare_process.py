"""Interruptions of a flow's process are never lost."""

import signal
from pathlib import Path

import pytest
from kiln_command import environment, python

pytestmark = pytest.mark.slow

#: As a flow that is interrupted within a weak reference's callback, as by an import's end.
PROGRAM = """
import os, signal, sys, time, weakref
from prefect.utilities.engine import capture_sigterm
from flows.prepare_process import prepare_process

class Collected:
    pass

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
prepare_process()
with capture_sigterm():
    collected = Collected()
    reference = weakref.ref(collected, lambda _: os.kill(os.getpid(), int(sys.argv[1])))
    del collected
    time.sleep(30)
    print("went on", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interruption_that_python_ignores_is_raised_again(
    tmp_path: Path, number: signal.Signals
) -> None:
    done = python("-c", PROGRAM, str(int(number)), env=environment(tmp_path))
    assert done.returncode == -number, done.stderr
    assert "went on" not in done.stdout
    assert "Exception ignored" not in done.stderr
