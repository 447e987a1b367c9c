"""`python -m runtimes`: killed or stopped at any moment, a run ends where it would have."""

import errno
import fcntl
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import SETTINGS, MakeJob, outputs
from waiting import wait_until

from configs.errors import Refused
from runtimes.__main__ import _processes, main, only_writer
from runtimes.process.job import EVENT_FD, Events, write_job
from runtimes.process.launcher import AGENT, Hosts, Stop
from runtimes.train.checkpoints import Checkpoints
from runtimes.train.training_loop import train

StartJob = Callable[..., Any]  # of conftest.py: a Child
#: Each costs a start of some seconds; 30 have been survived, too.
KILLS = int(os.environ.get("KILN_TEST_KILLS", "3"))


@pytest.mark.extended
@pytest.mark.slow
def test_killed_and_stopped_it_ends_with_the_same_bytes(
    make_job: MakeJob, start_job: StartJob, chance: random.Random
) -> None:
    # Three are stopped early. Each is at most a full pipe ahead of us, which is less than 35 lines.
    settings = {**SETTINGS, "steps": 120, "logging_steps": 1}
    whole = make_job("whole", **settings)
    assert train(whole, Events(), Stop())

    job = make_job("broken", **settings)
    killed = start_job(job)
    assert killed.step_of_first("checkpoint") == 7
    time.sleep(chance.random() / 3)
    killed.process.kill()
    assert killed.end() == -signal.SIGKILL

    stopped = start_job(job)
    assert stopped.step_of_first("start") >= 7
    stopped.step_of_first("progress")
    stopped.process.terminate()
    assert stopped.end() == 143
    saved = Checkpoints(job.work, 9).latest()
    assert saved is not None

    orphaned = start_job(job)
    assert orphaned.step_of_first("start") == saved.step
    orphaned.step_of_first("progress")
    orphaned.process.stdin.close()  # type: ignore[union-attr]
    assert orphaned.end() == 143

    assert train(job, Events(), Stop())
    assert outputs(job) == outputs(whole)
    assert sorted(outputs(job)) == [
        "history.jsonl",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
    ]


@pytest.mark.soak
def test_killed_again_and_again_it_redoes_only_what_no_checkpoint_has(
    make_job: MakeJob, start_job: StartJob, chance: random.Random
) -> None:
    settings = {**SETTINGS, "steps": 200, "checkpointing_steps": 5, "logging_steps": 1}
    whole = make_job("whole", **settings)
    assert train(whole, Events(), Stop())

    job, saved = make_job("broken", **settings), 0
    for moment in sorted(chance.sample(range(1, 195), KILLS)):
        child = start_job(job)
        assert child.step_of_first("start") == saved
        while child.step_of_first("progress") < moment:
            pass
        time.sleep(chance.random() / 30)  # in the middle of a step, or of a checkpoint
        child.process.kill()
        assert child.end() == -signal.SIGKILL
        manifests = Path(job.work).glob("checkpoints/step-*/manifest.json")
        saved = max((int(path.parent.name.removeprefix("step-")) for path in manifests), default=0)
        assert saved > moment - 3 * 5, "one was being written, at most one more was waiting"
    assert start_job(job).end() == 0
    assert outputs(job) == outputs(whole)


SLOW_SAVE = """
import sys, time
from runtimes.__main__ import main
from runtimes.train.checkpoints import Checkpoints
save = Checkpoints.save
def slow(*arguments, **more):
    print("saving", flush=True)
    time.sleep(2)
    return save(*arguments, **more)
Checkpoints.save = slow
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.extended
@pytest.mark.slow
def test_a_stage_that_asks_and_then_dies_does_not_kill_the_save(
    make_job: MakeJob, start_job: StartJob
) -> None:
    job = make_job(steps=5000, checkpointing_steps=5000, logging_steps=10)
    child = start_job(job, ("-c", SLOW_SAVE), pipe=2**16)
    child.step_of_first("progress")
    child.process.terminate()
    assert child.process.stdout and child.process.stdin
    assert child.process.stdout.readline() == b"saving\n"
    child.process.stdin.close()
    assert child.end() == 143
    assert Checkpoints(job.work, 9).latest() is not None


WRONG = {
    "model /nowhere: no such folder": {"model": "/nowhere"},
    "model_index.json is missing": {"model": "/"},
    "no latents artifact is there": {"latents": "/nowhere"},
    "this machine has": {"device": "cuda:77"},
}


@pytest.mark.parametrize("says", WRONG)
def test_wrong_input_is_one_line_and_exit_code_2(
    make_job: MakeJob,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    says: str,
) -> None:
    monkeypatch.setattr(Stop, "listen", lambda stop: None)  # the signals are pytest's
    write_job(make_job(**WRONG[says]), tmp_path / "job.json")
    assert main([str(tmp_path / "job.json")]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and says in line


@pytest.mark.slow
def test_an_error_of_the_disk_says_which(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stop, "listen", lambda stop: None)
    (tmp_path / "file").write_text("")
    write_job(replace(make_job(steps=1), out=str(tmp_path / "file")), tmp_path / "job.json")
    read, write = os.pipe()
    monkeypatch.setenv(EVENT_FD, str(write))
    assert main([str(tmp_path / "job.json")]) == 1
    error = json.loads(os.read(read, 2**16).splitlines()[-1])
    os.close(read)
    assert error["event"] == "error" and not error["wrong_input"]
    assert error["errno"] in (errno.ENOTDIR, errno.EEXIST)
    assert error["file"].startswith(str(tmp_path / "file"))


def test_a_work_folder_has_one_writer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    order: list[str] = []

    def second() -> None:
        with only_writer(str(tmp_path)):
            order.append("second")

    with (tmp_path / ".lock").open("a") as first, caplog.at_level(logging.WARNING, "kiln"):
        fcntl.flock(first, fcntl.LOCK_EX)
        waiting = threading.Thread(target=second)
        waiting.start()
        wait_until(lambda: "waiting for it" in caplog.text, 30)
        order.append("first")
    waiting.join(10)
    assert order == ["first", "second"]


def test_hosts_of_a_run_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Their first processes write one folder, on a shared disk or on one machine."""
    for work in (str(tmp_path), f"memory://{tmp_path}"):
        waiting = threading.Thread(target=lambda work=work: enter(work, 1), daemon=True)
        with only_writer(work, 0):
            waiting.start()
            waiting.join(20)
            assert not waiting.is_alive()


def enter(work: str, host: int) -> None:
    with only_writer(work, host):
        pass


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_batch_is_shared_by_the_processes_of_all_hosts(
    hosts: int, make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"NNODES": hosts, "NODE_RANK": 0, "MASTER_ADDR": "first", "MASTER_PORT": 29500}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    job, found = make_job(processes=3, global_batch_size=3), Hosts.here()
    if hosts == 1:
        assert _processes(job, False, found) == 3
    else:
        with pytest.raises(Refused, match="3 cannot be shared by 6 processes"):
            _processes(job, False, found)


def python(*lines: str) -> int:
    return subprocess.run([sys.executable, "-c", "\n".join(lines)], timeout=60).returncode


def test_the_first_signal_asks_and_the_second_kills() -> None:
    lines = (
        "import os, signal, time; from runtimes.process.launcher import Stop",
        "stop = Stop(); stop.listen(); stop.defer()",
        "os.kill(os.getpid(), signal.SIGTERM); assert stop.requested",
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)",
    )
    assert python(*lines) == -signal.SIGTERM


def test_a_signal_before_there_is_anything_to_save_ends_the_process() -> None:
    lines = (
        "import os, signal, time; from runtimes.process.launcher import Stop",
        "Stop().listen(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)",
    )
    assert python(*lines) == 143


def test_a_byte_of_the_launcher_asks_and_a_signal_after_it_does_not_kill() -> None:
    """Some senders signal every process, and rank 0 passes its own signal on."""
    lines = (
        "import os, signal, time; from runtimes.process.launcher import Stop",
        "stop = Stop(); stop.listen(); stop.defer()",
        "while not stop.requested: time.sleep(0.01)",
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.1); print('alive', flush=True)",
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)",
    )
    child = subprocess.Popen(
        [sys.executable, "-c", "\n".join(lines)],
        env={**os.environ, EVENT_FD: "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin and child.stdout
    child.stdin.write(b"\n")
    child.stdin.flush()
    assert child.stdout.readline() == b"alive\n"
    assert child.wait(60) == -signal.SIGTERM
    child.stdin.close()


IN_A_COLLECTIVE = """
import ctypes, os, signal
from runtimes.process.launcher import Stop
stop = Stop(); stop.listen(); stop.defer()
os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGTERM)
print("asked twice", flush=True)
mutex = ctypes.create_string_buffer(64)  # zeros: an unlocked mutex
ctypes.CDLL(None).pthread_mutex_lock(mutex); ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def test_a_host_s_agent_kills_and_its_death_ends_a_rank_that_waits_for_a_lost_host() -> None:
    """A second signal does not: Slurm signals the ranks and the agent, which passes its own on."""
    child = subprocess.Popen(
        [sys.executable, "-c", IN_A_COLLECTIVE],
        env={**os.environ, EVENT_FD: "1", AGENT: "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin and child.stdout
    try:
        assert child.stdout.readline() == b"asked twice\n"
        child.stdin.close()
        assert child.wait(20) == 143
    finally:
        child.kill()
