"""Workers report to the flow by one small file each, whatever their number of shards."""

import json
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from artifacts.filesystems import Clock
from artifacts.store import Store
from tasks.beam.workers import (
    WorkerReport,
    WorkerReports,
    progress_text,
    shard_counts,
    worker_report,
)
from tasks.progress import seconds_in_words

KEYS = [f"{number:064d}"[::-1] for number in range(1, 6)]


def test_the_flow_adds_up_what_all_workers_have_done(tmp_path: Path) -> None:
    store, folder = Store(str(tmp_path)), f"{tmp_path}/download/key/progress"
    now = [0.0]
    one, other = (WorkerReport(store.url, folder, Clock(lambda: now[0])) for _ in range(2))
    reports = WorkerReports(store, folder)
    assert reports.done().shards == set()
    one.add(KEYS[0], shard_counts(10, {"timeout": 2}, 500, is_new=True))
    other.add(KEYS[1], shard_counts(20, {}, 700, is_new=False))
    found = reports.done()
    assert found.rows({KEYS[0]: 10, KEYS[1]: 20, KEYS[2]: 40}) == 30
    assert found.counts == {"failed timeout": 2, "rows": 10, "bytes": 500}

    one.add(KEYS[2], shard_counts(40, {}, 100, is_new=True))  # too early to be written
    assert reports.done().rows(dict.fromkeys(KEYS, 1)) == 2
    now[0] = 60.0
    one.add(KEYS[1], shard_counts(20, {}, 700, is_new=False))  # of a worker that was lost
    assert reports.done().rows(dict.fromkeys(KEYS, 1)) == 3
    assert len(list(Path(folder).iterdir())) == 2
    reports.clear()
    assert WorkerReports(store, folder).done().shards == set()


def test_a_worker_of_two_runs_reports_the_second_alone(tmp_path: Path) -> None:
    store, folder = Store(str(tmp_path)), f"{tmp_path}/encode/key/progress"
    worker_report(store.url, folder, "one").add(KEYS[0], {"rows": 10})
    for report in Path(folder).iterdir():  # as the flow, another process, clears them
        report.unlink()
    for key in KEYS[1:3]:
        report = worker_report(store.url, folder, "two")
        report.add(key, {"rows": 20})
    report.flush()
    found = WorkerReports(store, folder).done()
    assert found.counts == {"rows": 40} and len(found.shards) == 2


def test_only_reports_that_have_grown_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fs, folder = MemoryFileSystem(), "/reports-of-workers"
    for number, key in enumerate(KEYS):
        report = {"shards": [key], "counts": {}}
        fs.pipe_file(f"{folder}/{number}.json", json.dumps(report).encode())
    reports, read = WorkerReports(Store("memory://"), folder), []
    asked = MemoryFileSystem.cat_file
    monkeypatch.setattr(
        MemoryFileSystem,
        "cat_file",
        lambda fs, path, *more, **named: read.append(path) or asked(fs, path, *more, **named),
    )
    assert len(reports.done().shards) == len(read) == len(KEYS)
    fs.pipe_file(f"{folder}/3.json", json.dumps({"shards": KEYS[:2], "counts": {}}).encode())
    reports.done()
    assert read[len(KEYS) :] == [f"{folder}/3.json"]


def test_a_line_of_progress_has_failures_rates_and_the_time_left() -> None:
    counts = {"failed timeout": 30, "failed http 404": 5, "rows": 1000, "bytes": 50_000_000}
    text = progress_text(2000, 10_000, "2 of 10 shards", "rows", counts, 10.0)
    assert text == (
        "2,000 of 10,000 rows, 2 of 10 shards, 35 failed (timeout 30, http 404 5), "
        "100.0 rows/s, 5.0 MB/s, 80 s left"
    )
    assert progress_text(5, 5, "1 of 1 shards", "rows", counts, 1.0).endswith("http 404 5)")
    assert progress_text(0, 5, "0 of 1 shards", "rows", {}, 0.0) == "0 of 5 rows, 0 of 1 shards"


def test_a_duration_has_two_units_at_least() -> None:
    assert [seconds_in_words(s) for s in (119, 120, 7199, 7200, 172_800)] == [
        "119 s",
        "2 min",
        "120 min",
        "2 h",
        "2 days",
    ]
