"""A job in a process of its own: its result, its errors, and its end when we are interrupted."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from runtimes.base import WrongInput
from runtimes.job import GenerateJob, TrainJob
from tasks.process import JobFailed, run_job


def endless(tmp_path: Path, model: Path) -> TrainJob:
    """A job that waits for its work folder, which somebody else holds."""
    return TrainJob("torch", str(model), "nowhere", {}, str(tmp_path / "w"), str(tmp_path / "o"))


def children() -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    return [int(p) for p, pp, args in rows if int(pp) == os.getpid() and "-m runtimes" in args]


def test_wrong_input_comes_back_as_itself(tmp_path: Path) -> None:
    job = GenerateJob("torch", str(tmp_path), (), ("a prompt",), {})
    with pytest.raises(WrongInput, match=r"model_index\.json"):
        run_job(job)


def test_a_process_that_is_killed_is_said_to_be(tmp_path: Path, tiny_sdxl: Path) -> None:
    held = _hold(tmp_path / "w")
    threading.Thread(target=_kill_child, args=(signal.SIGKILL,)).start()
    try:
        with pytest.raises(JobFailed, match="was killed by SIGKILL"):
            run_job(endless(tmp_path, tiny_sdxl))
    finally:
        held.kill()
        held.wait()


def test_when_we_are_interrupted_the_process_ends_with_us(tmp_path: Path, tiny_sdxl: Path) -> None:
    held = _hold(tmp_path / "w")

    def interrupt() -> None:
        while not children():
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    # A test run in background may have been started with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_job(endless(tmp_path, tiny_sdxl), grace_seconds=1.0)
    finally:
        signal.signal(signal.SIGINT, before)
        held.kill()
        held.wait()
    assert children() == []


def _hold(work: Path) -> "subprocess.Popen[str]":
    """Another process that holds a work folder's lock."""
    work.mkdir()
    child = subprocess.Popen(
        ["flock", str(work / ".lock"), "sh", "-c", "echo held; exec sleep 60"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def _kill_child(number: int) -> None:
    while not (found := children()):
        time.sleep(0.05)
    os.kill(found[0], number)
