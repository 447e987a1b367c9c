"""Kill a flow, or its training process, where it is about to write a record of the store."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kiln_command import ROOT, command, environment
from waiting import wait_until

TIMEOUT = 600  # seconds, for a busy machine
KILLED = "the runtime's process was killed by SIGKILL"


def halt_at(record: str, number: int, told: Path) -> dict[str, str]:
    """Variables of tests/halting; the file `told` is deleted."""
    told.unlink(missing_ok=True)
    halt = {"record": record, "number": number, "told": str(told)}
    return {"PYTHONPATH": f"{ROOT / 'tests/halting'}:{ROOT}", "KILN_TEST_HALT": json.dumps(halt)}


def kill_at_record(
    folder: Path, api: str, words: list[str], overrides: dict[str, Any], record: str, number: int
) -> str:
    """Run `kiln` and kill the process that is about to write its nth record of a pattern.

    Returns what `kiln` had said by then.
    """
    told, log = folder / "told", folder / "log"
    with log.open("wb") as stream:
        child = subprocess.Popen(
            command(*words, overrides=overrides),
            env=environment(folder, api) | halt_at(record, number, told),
            cwd=ROOT,
            stdout=stream,
            stderr=stream,
        )
    wait_until(told.exists, TIMEOUT, alive=lambda: child.poll() is None, says=log.read_text)
    victim = int(told.read_text())
    os.kill(victim, signal.SIGKILL)
    code, said = child.wait(TIMEOUT), log.read_text()
    if victim == child.pid:
        assert code == -signal.SIGKILL
    else:
        assert code == 1 and KILLED in said
    return said


def kill_training(run: Callable[[], str], folder: Path, checkpoint: int) -> None:
    """Kill the training process of `run()` before it commits its nth checkpoint."""
    pid_file = folder / "told"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in halt_at(r"/train/\w+/checkpoints/", checkpoint, pid_file).items():
            patch.setenv(name, value)
        killing = kill_when_told(pid_file, TIMEOUT)
        output = run()
    assert KILLED in output
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
