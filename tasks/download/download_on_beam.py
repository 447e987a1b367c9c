"""The download as a Beam pipeline: one element per shard, results in the store."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

import apache_beam as beam

from artifacts.filesystems import ask_at_once, delete_tree, entries
from artifacts.records import write_atomic
from artifacts.store import Store
from tasks.beam.pipeline import ShardProgress, run_linear
from tasks.beam.workers import WorkerReports, shard_counts, worker_report
from tasks.download import shard
from tasks.download.rows import Outage
from tasks.download.shard_plan import ShardSpec

#: Shards in progress per process. They share its connections, which one shard's end leaves idle.
THREADS = 4
#: Shards that a process defers in a row before the stage stops: all others would fare alike.
MOST_DEFERRED = 8

#: Run -> shards that this process has deferred since its last download of a shard.
_in_a_row: Counter[str] = Counter()
_in_a_row_lock = threading.Lock()


class DownloadShard(beam.DoFn):
    """Downloads a shard, or writes a note with the reasons for deferring it.

    Raises Outage after MOST_DEFERRED deferred shards in a row; shards of the store do not count.
    """

    def __init__(self, context: shard.DownloadContext) -> None:
        self.context = context
        self.run = uuid4().hex

    def process(self, spec: ShardSpec) -> Iterator[str]:
        result = shard.download_shard(spec, self.context)
        if isinstance(result, shard.Deferred):
            note = f"{self.context.notes}/{spec.key}.json"
            write_atomic(Store(self.context.store).fs, note, json.dumps(result.reasons).encode())
            with _in_a_row_lock:
                _in_a_row[self.run] += 1
                if _in_a_row[self.run] >= MOST_DEFERRED:
                    raise Outage(f"{MOST_DEFERRED} shards in a row")
        else:
            outcomes = result.meta["outcomes"]
            failed = {reason: rows for reason, rows in outcomes.items() if reason != "success"}
            fetched = result.meta["fetched"]
            counts = shard_counts(spec.rows, failed, fetched, is_new=result.is_new)
            report = worker_report(self.context.store, self.context.reports, self.run)
            report.add(spec.key, counts)
            if result.is_new:
                with _in_a_row_lock:
                    del _in_a_row[self.run]
        yield spec.key


def run_pipeline(
    specs: Sequence[ShardSpec],
    context: shard.DownloadContext,
    options: Mapping[str, Any],
    progress: Callable[[int, int, str], None],
) -> list[shard.Deferred]:
    """Download every shard into the store and return the deferred shards.

    Args:
        options: Beam pipeline options, from the recipe's `beam` section.

    Raises:
        Failed: the store is not writable; Away if it is full or does not answer.
        Refused: the source changed or cannot be read; Away if it does not answer.
        Refused: Beam rejects `options`.
        Outage: a process deferred MOST_DEFERRED shards in a row; the others were not tried.
    """
    store = Store(context.store)
    reports = WorkerReports(store, context.reports)
    reports.clear()  # of an earlier run
    _clear(store, context.notes)
    sizes = {spec.key: spec.rows for spec in specs}
    watch = ShardProgress(store, context.reports, sizes, progress)
    try:
        run_linear(specs, DownloadShard(context), options, watch, threads=THREADS, known=(Outage,))
    except Outage:
        noted = _read_notes(store, context)
        raise Outage(
            f"download: stopped, since {MOST_DEFERRED} shards in a row were deferred after "
            f"transient failures, {len(noted)} of {len(specs)} in all "
            f"({shard.all_reasons(noted)}): run again when the network or the hosts are back, or "
            "raise download.max_transient"
        ) from None
    finally:
        reports.clear()
    deferred = _read_notes(store, context)
    _clear(store, context.notes)
    return deferred


def _read_notes(store: Store, context: shard.DownloadContext) -> list[shard.Deferred]:
    """The deferred shards, without those that a repeated bundle has committed since."""
    paths = sorted(entry["name"] for entry in entries(store.fs, context.notes))
    notes = map(json.loads, ask_at_once(store.fs, store.fs.cat_file, paths))
    keys = [path.rpartition("/")[2].removesuffix(".json") for path in paths]
    present = store.committed_shards(shard.STAGE, keys)
    return [
        shard.Deferred(key, reasons)
        for key, reasons, committed in zip(keys, notes, present, strict=True)
        if committed is None or shard.is_retried(committed.meta, context)
    ]


def _clear(store: Store, notes: str) -> None:
    store.fs.invalidate_cache(notes)
    if store.fs.exists(notes):
        delete_tree(store.fs, notes)
