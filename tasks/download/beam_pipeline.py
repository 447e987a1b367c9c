"""The download as a Beam pipeline: one element per shard, results in the store."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import apache_beam as beam

from artifacts.commit import write_atomic
from artifacts.store import Store
from tasks.beam import ShardProgress, names_in, run_linear
from tasks.download.download_shard import (
    STAGE,
    Deferred,
    DownloadContext,
    download_shard,
)
from tasks.download.errors import SourceError
from tasks.download.plan_source import ShardSpec

#: Threads overlap well: fetching waits for the network, and decoding releases the GIL.
THREADS = min(4, os.cpu_count() or 1)


class DownloadShard(beam.DoFn):
    """Downloads a shard, or writes a note with the reasons for deferring it."""

    def __init__(self, context: DownloadContext) -> None:
        self.context = context

    def process(self, spec: ShardSpec) -> Iterator[str]:
        result = download_shard(spec, self.context)
        if isinstance(result, Deferred):
            note = f"{self.context.notes}/{spec.key}.json"
            write_atomic(Store(self.context.store).fs, note, json.dumps(result.reasons).encode())
        yield spec.key


def run_pipeline(
    specs: Sequence[ShardSpec],
    context: DownloadContext,
    options: Mapping[str, Any],
    progress: Callable[[int, int, str], None],
) -> list[Deferred]:
    """Download every shard into the store and return the deferred ones.

    Args:
        options: Beam pipeline options, of the recipe's `beam` section.

    Raises:
        OSError: the store is full or not writable.
        SourceError: the source changed or cannot be read.
        BeamOptionsError: Beam rejects `options`.
    """
    store = Store(context.store)
    _clear(store, context.notes)
    watch = ShardProgress(store, STAGE, {spec.key: spec.rows for spec in specs}, progress)
    run_linear(specs, DownloadShard(context), options, watch, threads=THREADS, known=(SourceError,))
    deferred = _read_notes(store, context.notes)
    _clear(store, context.notes)
    return deferred


def _read_notes(store: Store, notes: str) -> list[Deferred]:
    names = sorted(names_in(store, notes))
    read = {name: json.loads(store.fs.cat_file(f"{notes}/{name}")) for name in names}
    return [Deferred(name.removesuffix(".json"), reasons) for name, reasons in read.items()]


def _clear(store: Store, notes: str) -> None:
    store.fs.invalidate_cache(notes)
    if store.fs.exists(notes):
        store.fs.rm(notes, recursive=True)
