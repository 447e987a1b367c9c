"""Shards on the threads of the default runner: balanced, ended by the first error."""

import errno
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import apache_beam as beam
import pytest

from artifacts.compare_and_swap import read, swap
from artifacts.lock import LockLost
from artifacts.store import Store
from configs.errors import Away
from tasks.beam.pipeline import KNOWN, ShardProgress, _in_turn, _plain, run_linear
from tasks.beam.workers import Done, WorkerReports

SECONDS = 30.0  # for a busy machine


class Meet(beam.DoFn):
    """Element 0 waits for all others, which one other thread can only do if none is its own."""

    done: ClassVar[list[int]] = []
    others = threading.Event()

    def process(self, element: int) -> Iterator[int]:
        if element == 0:
            assert self.others.wait(SECONDS), f"only {self.done} were done meanwhile"
        self.done.append(element)
        if len(self.done) == 9:
            self.others.set()
        yield element


class Fail(beam.DoFn):
    """Fails at the first element."""

    done: ClassVar[list[int]] = []

    def process(self, element: int) -> Iterator[int]:
        self.done.append(element)
        raise ZeroDivisionError
        yield


def watch(folder: Path) -> ShardProgress:
    return ShardProgress(Store(str(folder)), "stage", {}, lambda *_: None)


def test_other_threads_do_the_shards_behind_a_slow_one(tmp_path: Path) -> None:
    run_linear(range(10), Meet(), {}, watch(tmp_path), threads=2)
    assert sorted(Meet.done) == list(range(10))


class Once(beam.DoFn):
    """Yields each element."""

    def process(self, element: int) -> Iterator[int]:
        yield element


def test_an_unreadable_report_ends_no_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store's client raises errors of its own types."""
    asked = []

    def refused(reports: WorkerReports) -> Done:
        asked.append(reports)
        raise ArithmeticError("503")

    monkeypatch.setattr(WorkerReports, "done", refused)
    run_linear(range(2), Once(), {}, watch(tmp_path))
    assert asked


def test_no_shard_begins_after_an_error() -> None:
    with _in_turn(range(10), Fail()) as (_, exhaust):
        with pytest.raises(ZeroDivisionError):
            list(exhaust.process(0))
        assert list(exhaust.process(1)) == []  # as another thread calls it
    assert Fail.done == [0]


class Full(beam.DoFn):
    """Finds no space, as a download into a full store."""

    def process(self, element: int) -> Iterator[int]:
        raise OSError(errno.ENOSPC, "No space left on device", "/store/shard")
        yield


def test_an_error_is_raised_and_not_printed_by_beam(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Away, match=r"^no space left for /store/shard: free some"):
        run_linear(range(4), Full(), {}, watch(tmp_path), threads=2)
    assert capfd.readouterr() == ("", "")


class TakeOver(beam.DoFn):
    """Counts its elements in a file. At the third another builder takes the flow's lock over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def process(self, element: int) -> Iterator[int]:
        with (self.folder / "done").open("a") as done:
            done.write("x")
        if len((self.folder / "done").read_text()) >= 3:
            self.take_over_once()
        yield element

    def take_over_once(self) -> None:
        """Take the lock over, or wait until another element has."""
        taken = self.folder / "taken"
        with suppress(FileExistsError), (self.folder / "taking").open("x"):
            fs, path = Store(str(self.folder)).fs, f"{self.folder}/stage/key/lock.json"
            assert swap(fs, path, read(fs, path), b'{"token": "of another"}')
            taken.touch()
        until = time.monotonic() + 60.0
        while not taken.exists() and time.monotonic() < until:
            time.sleep(0.01)


on_threads_and_processes = pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {"direct_running_mode": "multi_processing", "direct_num_workers": 2},
            marks=[pytest.mark.slow, pytest.mark.extended],
        ),
    ],
    ids=["threads", "processes"],
)


class ReadAway(beam.DoFn):
    """Reads from S3 while it does not answer."""

    def process(self, element: int) -> Iterator[int]:
        from botocore.exceptions import ClientError
        from s3fs.errors import translate_boto_error

        refused = ClientError({"Error": {"Code": "SlowDown", "Message": "slow down"}}, "GetObject")
        raise translate_boto_error(refused) from refused
        yield


@on_threads_and_processes
def test_an_outage_of_the_store_is_waited_for(
    options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    progress = ShardProgress(Store("memory://store-away"), "stage", {}, lambda *_: None)
    with pytest.raises(
        Away, match=r"^memory:.* cannot be used now \(.*slow down\): run again later$"
    ):
        run_linear(range(2), ReadAway(), options, progress, threads=2)
    assert options or "Traceback" not in capfd.readouterr().err  # in threads of a flow's process


def test_a_full_disk_of_the_runner_is_waited_for() -> None:
    """Beam keeps the text of an error that its own files cause."""
    full = "RuntimeError: OSError: [Errno 28] No space left on device: '/tmp/spilled'"
    assert type(_plain(RuntimeError(full), ())) is Away
    assert _plain(RuntimeError("[Errno 2] No such file or directory"), ()) is None


def test_what_a_worker_lacks_keeps_its_type_and_words() -> None:
    """Beam keeps the text of an error in another process alone."""
    text = "configs.errors.Away: raise `ulimit -n` [while running 'ParDo']"
    found = _plain(RuntimeError(text), KNOWN)
    assert type(found) is Away
    assert str(found) == "raise `ulimit -n`"


@on_threads_and_processes
def test_a_flow_that_lost_its_lock_begins_no_further_shard(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    store = Store(str(tmp_path))
    with store.lock("stage", "key"), pytest.raises(LockLost, match=r"lock\.json: another process"):
        run_linear(range(50), TakeOver(tmp_path), options, watch(tmp_path))
    assert 3 <= len((tmp_path / "done").read_text()) < 10
