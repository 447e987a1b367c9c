"""Kill the training process of a flow while it writes a checkpoint."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kiln_command import ROOT

TIMEOUT = 600  # seconds, for a busy machine


def kill_training(run: Callable[[], str], folder: Path, checkpoint: int) -> None:
    """Kill the training process of `run()` before it commits its nth checkpoint."""
    pid_file = folder / "told"
    pid_file.unlink(missing_ok=True)
    halt = {"record": r"/train/\w+/checkpoints/", "number": checkpoint, "told": str(pid_file)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT / 'tests/halting'}:{ROOT}")
        patch.setenv("KILN_TEST_HALT", json.dumps(halt))
        killing = kill_when_told(pid_file, TIMEOUT)
        output = run()
    assert "the runtime's process was killed by SIGKILL" in output
    killing.join()


def kill_when_told(pid_file: Path, seconds: float) -> threading.Thread:
    """Kill the process that writes its pid to a file within `seconds`, in a thread."""

    def kill() -> None:
        until = time.monotonic() + seconds
        while not pid_file.exists() and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(int(pid_file.read_text()), signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread
