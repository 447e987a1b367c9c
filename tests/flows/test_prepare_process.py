"""A flow's process loses no interruption, and outlives its console."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kiln_command import ROOT, environment, python

pytestmark = pytest.mark.slow

#: As a flow that is interrupted within a weak reference's callback, as by an import's end.
PROGRAM = """
import os, signal, sys, time, weakref
from prefect.utilities.engine import capture_sigterm
from flows.flow_process import prepare_process

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


#: As a flow whose worker is killed: the pipe of its console ends.
ORPHAN = """
import logging, sys, threading
from pathlib import Path
from prefect.logging.configuration import setup_logging
from flows.flow_process import prepare_process

setup_logging()
prepare_process()
log, drained = logging.getLogger("kiln"), []

def pump():
    for line in range(3):
        log.info("line %s", line)
        drained.append(line)

sys.stdin.read()  # until the worker is gone
thread = threading.Thread(target=pump)
thread.start()
thread.join()
print("noise of a library", file=sys.stderr, flush=True)
Path(sys.argv[1]).write_text(str(drained))
"""


def test_a_run_goes_on_without_the_console_of_a_killed_worker(tmp_path: Path) -> None:
    """Its threads too: the one that reads a training's events must not end."""
    ended = tmp_path / "ended"
    flow = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(ended)],
        env={**environment(tmp_path), "PREFECT_LOGGING_LEVEL": "INFO"},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert flow.stdin is not None and flow.stdout is not None
    flow.stdout.close()
    flow.stdin.close()
    assert flow.wait() == 0
    assert ended.read_text() == "[0, 1, 2]"
