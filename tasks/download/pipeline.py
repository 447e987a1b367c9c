"""The download as a Beam pipeline: one element a shard, one chain, results in the store."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import apache_beam as beam

from artifacts.commit import write_atomic
from artifacts.store import Store
from tasks.beam import Watch, names_in, run_linear
from tasks.download.errors import SourceError
from tasks.download.shard import STAGE, Left, ShardSpec, Work, download_shard

#: Fetching waits, and decoding holds no interpreter lock.
THREADS = min(4, os.cpu_count() or 1)


class DownloadShard(beam.DoFn):
    """Downloads a shard; what it cannot, it leaves a note about and goes on with the next."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def process(self, spec: ShardSpec) -> Iterator[str]:
        done = download_shard(spec, self.work)
        if isinstance(done, Left):
            note = f"{self.work.notes}/{spec.key}.json"
            write_atomic(Store(self.work.store).fs, note, json.dumps(done.reasons).encode())
        yield spec.key


def run_pipeline(
    specs: Sequence[ShardSpec],
    work: Work,
    options: Mapping[str, Any],
    progress: Callable[[int, int, str], None],
) -> list[Left]:
    """Bring every shard into the store; returns those that had to be left.

    Raises OSError for a store that is full or closed, SourceError for `options` that Beam does not
    take.
    """
    store = Store(work.store)
    _clear(store, work.notes)
    watch = Watch(store, STAGE, {spec.key: spec.rows for spec in specs}, progress)
    run_linear(specs, DownloadShard(work), options, watch, threads=THREADS, known=(SourceError,))
    left = _read_notes(store, work.notes)
    _clear(store, work.notes)
    return left


def _read_notes(store: Store, notes: str) -> list[Left]:
    names = sorted(names_in(store, notes))
    read = {name: json.loads(store.fs.cat_file(f"{notes}/{name}")) for name in names}
    return [Left(name.removesuffix(".json"), reasons) for name, reasons in read.items()]


def _clear(store: Store, notes: str) -> None:
    store.fs.invalidate_cache(notes)
    if store.fs.exists(notes):
        store.fs.rm(notes, recursive=True)
