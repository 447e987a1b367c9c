"""Kill the process that trains, at a record that it writes, of a flow in this process."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command import ROOT

PATIENCE = 600  # seconds, for a machine that does much else


def kill_training(run: Callable[[], str], folder: Path, checkpoint: int) -> None:
    """Kill it before it commits a checkpoint, the nth that it writes, while `run()` runs."""
    told = folder / "told"
    told.unlink(missing_ok=True)
    halt = {"record": r"/train/\w+/checkpoints/", "number": checkpoint, "told": str(told)}

    def kill() -> None:
        until = time.monotonic() + PATIENCE
        while not told.exists() and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(int(told.read_text()), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT / 'tests/halting'}:{ROOT}")
        patch.setenv("KILN_TEST_HALT", json.dumps(halt))
        killing = threading.Thread(target=kill, daemon=True)
        killing.start()
        said = run()
    assert "the runtime's process was killed by SIGKILL" in said
    killing.join()
