"""What the workers of a pipeline have done so far: each process writes one small file.

The flow reads these files to show progress. A listing of the shards themselves would grow with the
store.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from artifacts.filesystems import REAL, Clock, Entry, entries, name_of
from artifacts.records import parse_json, write_atomic
from artifacts.remote_stores import ask_at_once, read_small_file
from artifacts.store import Store
from configs.secrets import one_line

#: Seconds between two writings of a report, at least.
EVERY_SECONDS = {True: 0.5, False: 10.0}  # by whether the store is local
#: A report takes at most this share of a worker's time.
SHARE = 0.05
#: Characters of a shard's key that a report has.
PREFIX = 16
FAILED = "failed "
#: Folder of the reports in a draft.
REPORTS = "progress"
log = logging.getLogger("kiln")


class WorkerReport:
    """Counts what one process has done, in a file of its own; threads may share it."""

    def __init__(self, store: str, folder: str, clock: Clock = REAL) -> None:
        self._store, self._clock = Store(store), clock
        self._path = f"{folder}/{uuid4().hex}.json"
        self._shards: list[str] = []
        self._counts: Counter[str] = Counter()
        self._next = 0.0
        self._lock = threading.Lock()

    def add(self, key: str, counts: Mapping[str, int]) -> None:
        """Count a shard that the store has; the file follows a few seconds later."""
        with self._lock:
            self._shards.append(key[:PREFIX])
            self._counts.update(counts)
            begun = self._clock.now()
            if begun >= self._next:
                self._write()
                took = self._clock.now() - begun
                self._next = begun + max(EVERY_SECONDS[self._store.is_local], took / SHARE)

    def flush(self) -> None:
        """Write the file now."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        data = json.dumps({"shards": self._shards, "counts": self._counts}).encode()
        try:
            write_atomic(self._store.fs, self._path, data)
        except Exception as error:  # the pipeline itself fails if the store does
            log.debug("no progress was reported: %s", one_line(error))


#: Run and report of this process, by folder.
_reports: dict[str, tuple[str, WorkerReport]] = {}
_reports_lock = threading.Lock()


def worker_report(store: str, folder: str, run: str) -> WorkerReport:
    """The report of this process for the reports in a folder.

    Args:
        run: unique id of the pipeline's run; a worker that outlives a run begins another report.
    """
    with _reports_lock:
        if folder not in _reports or _reports[folder][0] != run:
            _reports[folder] = run, WorkerReport(store, folder)
        return _reports[folder][1]


@dataclass
class Done:
    """What all workers have done. A shard of a worker that was killed may count twice."""

    shards: set[str] = field(default_factory=set)  # the first PREFIX characters of keys
    counts: Counter[str] = field(default_factory=Counter)

    def rows(self, sizes: Mapping[str, int]) -> int:
        """Rows of the shards that are done, of {key: rows}."""
        return sum(rows for key, rows in sizes.items() if key[:PREFIX] in self.shards)


def shard_counts(rows: int, failed: Mapping[str, int], size: int, *, is_new: bool) -> Counter[str]:
    """What `WorkerReport.add` counts of a shard.

    Args:
        failed: rows without a result, by reason.
        size: bytes that were read or fetched for it.
        is_new: whether this run has built it.
    """
    counts = Counter({f"{FAILED}{reason}": count for reason, count in failed.items()})
    return counts + Counter({"rows": rows, "bytes": size} if is_new else {})


def progress_text(
    done: int, total: int, shards: str, unit: str, counts: Mapping[str, int], seconds: float
) -> str:
    """A line on what is done, what failed and how fast: `seconds` since the beginning."""
    failed = Counter(
        {name.removeprefix(FAILED): n for name, n in counts.items() if name.startswith(FAILED)}
    )
    parts = [f"{done:,} of {total:,} {unit}, {shards}"]
    if failed:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in failed.most_common(3))
        parts.append(f"{failed.total():,} failed ({reasons})")
    rate = counts.get("rows", 0) / max(seconds, 1e-9)
    if rate and done < total:
        parts.append(f"{rate:,.1f} {unit}/s")
        parts.append(f"{counts.get('bytes', 0) / 1e6 / seconds:,.1f} MB/s")
        parts.append(f"{duration((total - done) / rate)} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Seconds in the largest unit of which there are two or more."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


class WorkerReports:
    """The reports of all workers, each of which is read again only once it has changed."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store, self._folder = store, folder
        self._read: dict[str, tuple[Any, dict[str, Any]]] = {}  # name -> stamp and content

    def clear(self) -> None:
        """Delete the reports, also those of an earlier run."""
        _reports.pop(self._folder, None)
        try:
            for entry in entries(self._store.fs, self._folder):
                self._store.fs.rm_file(entry["name"])
        except Exception as error:  # the pipeline itself fails if the store does
            log.debug("reports of progress stay: %s", one_line(error))

    def flush(self) -> None:
        """Write the report of this process now, if it has one."""
        if self._folder in _reports:
            _reports[self._folder][1].flush()

    def done(self) -> Done:
        """The sum of all reports. Raises as the filesystem does."""
        found = entries(self._store.fs, self._folder)
        changed = [e for e in found if self._read.get(name_of(e), (None,))[0] != _stamp(e)]
        for entry, data in zip(
            changed, ask_at_once(self._store.fs, self._bytes, changed), strict=True
        ):
            self._read[name_of(entry)] = (_stamp(entry), parse_json(data))
        total = Done()
        for _, report in self._read.values():
            total.shards.update(report["shards"])
            total.counts.update(report["counts"])
        return total

    def _bytes(self, entry: Entry) -> bytes:
        return read_small_file(self._store.fs, entry["name"])


def _stamp(entry: Entry) -> tuple[Any, ...]:
    """What changes when a report is written again: its list of shards grows."""
    return (entry["size"],)
