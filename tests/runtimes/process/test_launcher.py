"""The first process of a run hears why another one has ended, and ends the rest."""

import ctypes
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from runtimes.__main__ import _fail_for
from runtimes.process import launcher
from runtimes.process.job import Events
from runtimes.process.launcher import FOLLOWER, Hosts, Launcher, LostRank, Ranks, is_follower

pytestmark = pytest.mark.slow

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PLACE, "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(launcher, "WAKE_SECONDS", 0.1)
    monkeypatch.setattr(launcher, "NOTICE_SECONDS", 20.0)


@pytest.fixture
def wrong_job(tmp_path: Path) -> Path:
    """A job that is refused before anything slow is imported."""
    path = tmp_path / "job.json"
    job = {
        "kind": "train",
        "runtime": "torch",
        "model": str(tmp_path),
        "latents": str(tmp_path / "gone"),
    }
    more = {"train": {}, "work": str(tmp_path / "w"), "out": str(tmp_path), "sample_prompts": []}
    path.write_text(json.dumps(job | more))
    return path


def must_not(lost: LostRank) -> None:
    raise AssertionError(lost)


def test_the_processes_of_a_machine_share_its_cores(wrong_job: Path) -> None:
    with Launcher(wrong_job, 2, must_not):
        assert Ranks.here() == Ranks(0, 2, 0, 2)
        assert not is_follower()
        cores = launcher.count_cores()
        assert os.environ["OMP_NUM_THREADS"] == str(max(1, cores // 2))
        assert FOLLOWER not in os.environ


def test_ranks_are_numbered_host_by_host(wrong_job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "first")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with Launcher(wrong_job, 2, must_not, Hosts(3, 1)):
        assert Ranks.here() == Ranks(2, 6, 0, 2)
        assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("first", "29500")
    with Launcher(wrong_job, 1, must_not, Hosts(3, 1)):
        assert Ranks.here() == Ranks(1, 3, 0, 1), "it is alone on its host, not in the run"


def test_the_port_of_the_rendezvous_is_kept_until_it_listens(wrong_job: Path) -> None:
    """A connection that gets it meanwhile would end the run."""
    from torch.distributed import TCPStore

    with Launcher(wrong_job, 2, must_not):
        port = int(os.environ["MASTER_PORT"])
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_cores_are_counted_where_the_system_gives_no_affinity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3}, raising=False)
    assert launcher.count_cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert launcher.count_cores() == 7


def test_an_error_caused_by_a_lost_rank_names_the_lost_rank(wrong_job: Path) -> None:
    with pytest.raises(LostRank, match="no latents artifact is there") as lost:  # noqa: SIM117
        with Launcher(wrong_job, 3, must_not):
            raise RuntimeError("connection closed by peer")
    assert lost.value.facts["wrong_input"] and lost.value.code == 2


def test_our_own_error_stays_our_own(wrong_job: Path) -> None:
    with pytest.raises(ValueError, match="of our own"), Launcher(wrong_job, 2, must_not):
        raise ValueError("of our own")


def test_ranks_that_wait_for_a_lost_rank_are_notified(
    wrong_job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "NOTICE_SECONDS", 0.5)
    told, heard = threading.Event(), list[LostRank]()

    def end(lost: LostRank) -> None:
        heard.append(lost)
        told.set()

    with Launcher(wrong_job, 2, end):
        assert told.wait(60)
    assert "no latents artifact is there" in str(heard[0])


def test_the_killed_rank_is_reported_before_the_one_that_noticed() -> None:
    noticed = LostRank(1, 1, {"message": "connection closed", "time": 5.0})
    killed = LostRank(2, -9, {})
    assert min((noticed, killed), key=lambda lost: lost.failed_at) is killed
    assert str(killed) == "process 2 of the run (from 0) was killed by SIGKILL"
    assert killed.code == 1


def test_an_outage_that_a_rank_reports_is_one_of_the_run() -> None:
    found = list[dict[str, Any]]()

    class Recorded(Events):
        def emit(self, event: str, **fields: Any) -> None:
            found.append(fields)

    for away in (True, False):
        assert _fail_for(LostRank(1, 1, {"message": "503", "away": away}), Recorded()) == 1
    assert [fields["away"] for fields in found] == [True, False]


def test_a_reported_loss_keeps_the_time_of_its_cause() -> None:
    """By it, the cause is found among the errors of several hosts."""
    found = list[dict[str, Any]]()

    class Recorded(Events):
        def emit(self, event: str, **fields: Any) -> None:
            found.append(fields)

    assert _fail_for(LostRank(3, 1, {"message": "of rank 3", "time": 5.0}), Recorded()) == 1
    assert found[0]["time"] == 5.0


def test_a_stop_reaches_a_rank_that_the_others_wait_for(
    wrong_job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is in a collective, where no handler of Python runs, until the other rank stops."""
    read, write = os.pipe()
    script = f"import sys, os; os.write({write}, sys.stdin.buffer.read(1))"

    def start(job: Path, rank: int) -> launcher._Child:
        process = subprocess.Popen(
            [sys.executable, "-c", script], pass_fds=(write,), stdin=subprocess.PIPE
        )
        return launcher._Child(rank, process, io.StringIO(), finished=True)

    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)  # zeros: an unlocked mutex
    heard: list[bytes] = []

    def collective() -> None:
        time.sleep(0.5)  # until the main thread waits below
        os.kill(os.getpid(), signal.SIGTERM)
        if select.select([read], [], [], 20)[0]:
            heard.append(os.read(read, 1))
        libc.pthread_mutex_unlock(mutex)

    monkeypatch.setattr(launcher, "_start", start)
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(b"handler"))
    try:
        with Launcher(wrong_job, 2, must_not):
            libc.pthread_mutex_lock(mutex)
            threading.Thread(target=collective).start()
            libc.pthread_mutex_lock(mutex)
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(read)
        os.close(write)
    assert heard == [b"\n", b"handler"]
    assert signal.set_wakeup_fd(-1) == -1


def test_a_killed_rank_is_an_earlier_cause_than_the_errors_of_its_peers() -> None:
    killed = LostRank(1, -9, {})
    failed = LostRank(2, 1, {"time": 5.0, "message": "connection closed by peer"})
    assert killed.facts["time"] < failed.facts["time"]
