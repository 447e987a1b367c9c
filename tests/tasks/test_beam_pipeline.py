"""Shards on the threads of the default runner: balanced, ended by the first error."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import apache_beam as beam
import pytest

from artifacts.store import Store
from tasks.beam_pipeline import ShardProgress, _in_turn, run_linear
from tasks.worker_reports import Done, WorkerReports

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
