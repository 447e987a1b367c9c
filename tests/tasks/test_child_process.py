"""A job in a child process: result, errors and interruption."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from fsspec.core import url_to_fs
from kiln_command import jobs_of
from waiting import wait_until

from artifacts import compare_and_swap as cas
from artifacts import lock
from artifacts.store import Store
from configs.errors import Away, Failed, Refused
from runtimes.process.job import GenerateJob, TrainJob, write_job
from tasks import child_process as tasks_run_job
from tasks.build_or_reuse import storing
from tasks.child_process import ChildOutput, JobFailed, run_job, wait_for_result

#: Runs a job, prints its events, and exits with 130 at an interruption.
STAGE = """
import json, signal, sys
from pathlib import Path
from runtimes.process.job import read_job
from tasks.child_process import run_job
# A test run in background may have been started with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    say = lambda event: print(json.dumps(event), flush=True)
    run_job(read_job(Path(sys.argv[1])), say, grace_seconds=60.0)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def endless(tmp_path: Path, tiny_sdxl: Path) -> Iterator[TrainJob]:
    """A job that waits for its work folder, which this test locks."""
    work = tmp_path / "w"
    work.mkdir()
    with (work / ".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield TrainJob("torch", str(tiny_sdxl), "nowhere", {}, str(work), str(tmp_path / "o"))


@pytest.mark.slow
def test_wrong_input_of_a_job_is_raised_here(tmp_path: Path) -> None:
    job = GenerateJob("torch", str(tmp_path), (), ("a prompt",), {})
    with pytest.raises(Refused, match=r"model_index\.json"):
        run_job(job)


@pytest.mark.slow
def test_an_outage_of_the_store_has_its_type(s3_away: None) -> None:
    job = GenerateJob("torch", "s3://models/tiny", (), ("a prompt",), {})
    with pytest.raises(Away, match=r"^a remote store cannot be used now \(.*Could not conn"):
        run_job(job)


@pytest.mark.slow
def test_a_job_whose_credentials_are_not_found_may_find_them_later(
    s3_away: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a cloud's machine whose service of credentials does not answer for a moment."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    job = GenerateJob("torch", "s3://models/tiny", (), ("a prompt",), {})
    with pytest.raises(Away, match=r"\(.*Unable to locate credentials\): log in by its"):
        run_job(job)


def test_a_file_that_a_job_cannot_write_is_named() -> None:
    """Such as one of a cache on a read-only disk; the store is another place."""
    error = {"event": "error", "message": "Read-only", "errno": errno.EROFS, "file": "/cache/a"}
    script = f"echo '{json.dumps(error)}'; exit 1"
    child = subprocess.Popen(
        ["sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    output = ChildOutput(lambda event: None)
    pumps = [lambda: output.events(child.stdout)]
    refused = pytest.raises(Failed, match=r"^no permission for /cache/a: grant it")
    with refused, storing(Store("memory://bucket")):
        wait_for_result(child, output, pumps, child.kill, child.kill)


WARNED = "a warning\nof two lines\n"
TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    import b\n'
ABORTED = """terminate called after throwing an instance of 'c10::Error'
  what():  CUDA error: an illegal memory access was encountered
Exception raised from c10_cuda_check (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x98
frame #1: main + 0x7
"""
OF_XLA = """F0000 00:00:00.1 123 hlo_module.cc:12] Check failed: a == b (1 vs. 2)
*** Check failure stack trace: ***
    @     0x7f0a  (unknown)
    @     0x7f0b  xla::Foo()
    @     0x7f0c  _start
"""
OF_MINDSPORE = """[CRITICAL] DEVICE(12,7f,python):[mindspore/a.cc:1] Init] no card
----------------------------------------------------
- C++ Call Stack: (For framework developers)
----------------------------------------------------
mindspore/ccsrc/x.cc:1
"""


@pytest.mark.parametrize(
    ("log", "end", "said"),
    [
        (WARNED, "kill -KILL $$", "was killed by SIGKILL: probably this machine ran out of memory"),
        ("", "kill -SEGV $$", "was killed by SIGSEGV$"),
        (WARNED, "kill -SEGV $$", r"was killed by SIGSEGV: a warning \| of two lines$"),
        (ABORTED, "kill -ABRT $$", r"SIGABRT: terminate called .* \| what\(\): CUDA error: [^|]*$"),
        (OF_XLA, "kill -ABRT $$", r"SIGABRT: F0000 .* Check failed: a == b \(1 vs\. 2\)$"),
        (OF_MINDSPORE, "kill -ABRT $$", r"SIGABRT: \[CRITICAL\] .* no card$"),
        ("an error: passed\n" + TRACEBACK + "AssertionError\n", "exit 1", "AssertionError$"),
        (
            WARNED + TRACEBACK + "ModuleNotFoundError: No module named 'b'\n",
            "exit 1",
            r'exited with 1: File "a.py", line 1, .* \| ModuleNotFoundError: No module named .b.$',
        ),
    ],
)
def test_the_error_of_a_process_that_died_is_one_line_of_what_matters(
    log: str, end: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text(log)
    child = subprocess.Popen(
        ["sh", "-c", f"cat {tmp_path}/log; {end}"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    output = ChildOutput(lambda event: None)
    pumps = [lambda: output.log(child.stdout)]
    with pytest.raises(JobFailed, match=said) as raised:
        wait_for_result(child, output, pumps, child.kill, child.kill)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_the_error_of_a_killed_process_names_the_signal(endless: TrainJob) -> None:
    def kill(event: dict[str, Any]) -> None:
        os.kill(jobs_of(os.getpid())[0], signal.SIGKILL)

    with pytest.raises(JobFailed, match="was killed by SIGKILL"):
        run_job(endless, kill)


@pytest.mark.slow
def test_an_interruption_ends_the_process_too(endless: TrainJob, tmp_path: Path) -> None:
    write_job(endless, tmp_path / "job.json")
    stage = subprocess.Popen(
        [sys.executable, "-c", STAGE, str(tmp_path / "job.json")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert stage.stdout is not None
    assert "waiting for it" in stage.stdout.readline()
    (child,) = jobs_of(stage.pid)
    stage.send_signal(signal.SIGINT)
    assert stage.wait(50) == 130
    wait_until(lambda: not Path(f"/proc/{child}").exists())


@pytest.mark.slow
def test_a_grandchild_that_keeps_the_log_open_does_not_delay_the_result() -> None:
    script = """sleep 60 & echo '{"event": "result", "n": 1}'"""
    child = subprocess.Popen(
        ["sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    output, begun = ChildOutput(lambda event: None), time.monotonic()
    pumps = [lambda: output.events(child.stdout)]
    assert wait_for_result(child, output, pumps, child.kill, child.kill)["n"] == 1
    assert time.monotonic() - begun < 30


def interrupt(child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a job, and be interrupted once it has said something."""
    ready = threading.Event()

    def interrupted(child: subprocess.Popen[str]) -> int:
        assert ready.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(tasks_run_job, "_wait", interrupted)
    output = ChildOutput(lambda event: ready.set())
    pumps = [lambda: output.events(child.stdout)]
    stop, kill = partial(tasks_run_job._stop, child, 30.0), partial(tasks_run_job._kill, child)
    with pytest.raises(KeyboardInterrupt):
        wait_for_result(child, output, pumps, stop, kill)


def test_a_job_that_is_stopped_is_known_whatever_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second SIGTERM would kill the job."""

    def interrupted(child: subprocess.Popen[str]) -> int:
        raise KeyboardInterrupt

    known = list[bool]()
    monkeypatch.setattr(tasks_run_job, "_wait", interrupted)
    child = subprocess.Popen(["sleep", "60"], text=True, start_new_session=True)
    with child, pytest.raises(KeyboardInterrupt):
        wait_for_result(
            child,
            ChildOutput(lambda event: None),
            (),
            lambda: known.append(tasks_run_job.stopping.is_set()),
            child.kill,
        )
    assert known == [True] and not tasks_run_job.stopping.is_set()


def test_an_interrupted_job_leaves_no_grandchild_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job ends at SIGTERM; its own child ignores it, and holds the log open."""
    script = """trap '' TERM; sleep 60 & trap 'exit 0' TERM; echo '{"event": "ready"}'; wait"""
    child = subprocess.Popen(
        ["sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    begun = time.monotonic()
    interrupt(child, monkeypatch)
    assert child.returncode == 0
    assert time.monotonic() - begun < 30


#: A job that exits a second after SIGTERM, and its child, which records a SIGTERM of its own.
JOB = """
trap 'sleep 1; kill -0 $! && echo alive >> "$0"; exit 0' TERM
(trap 'echo signalled >> "$0"' TERM; echo '{"event": "ready"}'; while :; do sleep 0.05; done) &
while :; do sleep 0.05; done
"""


@pytest.mark.slow
def test_a_stop_signals_the_job_and_not_its_own_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its compile process, PyTorch's compilation and so the job's stop never end."""
    found = tmp_path / "found"
    child = subprocess.Popen(
        ["sh", "-c", JOB, str(found)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    interrupt(child, monkeypatch)
    assert child.returncode == 0
    assert found.read_text() == "alive\n"
    with pytest.raises(ProcessLookupError):  # once init has reaped it
        for _ in range(600):
            os.killpg(child.pid, 0)
            time.sleep(0.05)


@pytest.mark.slow
def test_a_job_whose_builder_lost_its_lock_is_killed_at_once() -> None:
    """Else two trainers write into one folder: this one has no time for a checkpoint."""
    fs, path = url_to_fs(f"memory://{uuid4()}/lock.json")
    with subprocess.Popen(["sleep", "20"], text=True) as child, lock.hold(fs, path) as held:
        seen = cas.read(fs, path)
        assert cas.swap(fs, path, seen, b'{"token": "of another"}')
        held.renew()
        with pytest.raises(lock.LockLost):
            wait_for_result(child, ChildOutput(lambda event: None), (), child.terminate, child.kill)
    assert child.returncode == -signal.SIGKILL
