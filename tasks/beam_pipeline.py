"""Run one DoFn over many shards on the recipe's Beam runner, and report progress."""

from __future__ import annotations

import contextvars
import errno
import logging
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from artifacts.lock import LockLost, held_claim
from artifacts.store import Store
from configs.secrets import one_line
from tasks.beam_options import make_pipeline, quiet_beam
from tasks.beam_workers import Workers, is_dask, workers_of
from tasks.build_or_reuse import MachineShort, StorageAway, StorageError, TransientError
from tasks.import_beam_quietly import quiet_import
from tasks.worker_reports import WorkerReports, progress_text, shard_counts

with quiet_import():
    import apache_beam as beam

    from tasks.check_worker_code import OnEqualWorkers, WorkerDiffers
    from tasks.on_store import OnStore

log = logging.getLogger("kiln")

#: Errors of runners that have lost workers, or the connection to their service.
LOST = re.compile(
    r"Channel closed prematurely|StatusCode\.(?:UNAVAILABLE|CANCELLED)|\bKilledWorker\b|"
    r"\bCommClosedError\b|Timed out (?:during|trying to)|\bFutureCancelledError\b"
)


#: The error of a runner that has no space for its own files.
FULL = re.compile(rf"\[Errno ({errno.ENOSPC}|{errno.EDQUOT})\]")
KNOWN = (WorkerDiffers, LockLost, MachineShort, StorageAway, StorageError)


class WorkersLost(TransientError):
    """The runner lost its workers, and does not replace them; committed shards are kept."""


@dataclass(frozen=True)
class ShardProgress:
    """A pipeline's progress, as its workers report it (worker_reports.py)."""

    store: Store
    reports: str  # folder of the workers' reports
    sizes: Mapping[str, int]  # shard key -> rows
    progress: Callable[[int, int, str], None]
    unit: str = "rows"

    def show_end(self, failed: Mapping[str, int]) -> None:
        """Show that all is done: workers do not report their last shards at once.

        Args:
            failed: rows without a result, by reason.
        """
        total, count = sum(self.sizes.values()), len(self.sizes)
        counts = shard_counts(0, failed, 0, is_new=False)
        shown = f"{count:,} of {count:,} shards"
        self.progress(total, total, progress_text(total, total, shown, self.unit, counts, 0.0))


@quiet_beam()
def run_linear(
    elements: Sequence[Any],
    dofn: beam.DoFn,
    options: Mapping[str, Any],
    watch: ShardProgress,
    *,
    threads: int = 1,
    known: tuple[type[Exception], ...] = (),
) -> None:
    """Run Create → Reshuffle → ParDo → Reshuffle, a pipeline shape that every runner supports.

    The DoFn writes its results to the store, since not every runner returns values or counters.

    Args:
        options, threads: as make_pipeline.
        known: exception types of the DoFn that are raised again with their message.

    Raises:
        BeamOptionsError: Beam rejects the options.
        LockLost: another builder took the lock of this thread over; no further shard was begun.
        StorageError: the store is not writable; StorageAway if it is full or does not answer.
        MachineShort: a worker lacks memory, open files or ports.
        WorkerDiffers: a worker has other code or packages than this process.
        WorkersLost: the runner lost workers; another run does the shards that are missing.
    """
    dofn = OnStore(dofn, watch.store.url, held_claim())
    pipeline = make_pipeline(options, threads=threads)
    in_threads = workers_of(options) is Workers.THREADS
    elsewhere = nullcontext((elements, OnEqualWorkers(dofn)))
    with _in_turn(elements, dofn) if in_threads else elsewhere as (inputs, do):
        shards = pipeline | beam.Create(list(inputs)) | beam.Reshuffle() | beam.ParDo(do)
        # With an output to wait for, Beam's job service notices that a worker is gone.
        _ = shards | "Results" >> beam.Reshuffle()
        with _watching(watch):
            try:
                _run(pipeline, options)
            except Exception as error:
                raise _plain(error, (*known, *KNOWN)) or error from error


def _run(pipeline: beam.Pipeline, options: Mapping[str, Any]) -> None:
    with _dask_settings() if is_dask(options) else nullcontext():
        result = pipeline.run()
    try:
        result.wait_until_finish()
    finally:
        if hasattr(result, "client"):  # Dask's, which its runner leaves open
            result.client.close()


def _dask_settings() -> AbstractContextManager[Any]:
    """Make the workers of this run's own cluster import Beam quietly, before their first shard."""
    import dask

    return dask.config.set({"distributed.worker.preload": ["tasks.beam_pipeline"]})


def dask_teardown(_worker: object) -> None:
    """Silence a Dask worker that closes: its last heartbeat, cut off, would print a traceback.

    Dask calls the function of this name in each preloaded module (distributed/preloading.py).
    """
    logging.getLogger("distributed.worker").setLevel(logging.CRITICAL)


class _Exhaust(beam.DoFn):
    """Runs another DoFn on the next element of a queue until it is empty, whatever its own is.

    Beam's threads would each have a fixed share of the elements, and wait for the slowest share.
    """

    queues: ClassVar[dict[str, deque[Any]]] = {}  # of this process; a pickled DoFn has the name

    def __init__(self, name: str, dofn: beam.DoFn) -> None:
        self.name, self.dofn = name, dofn

    def process(self, _: int) -> Iterator[Any]:
        """Yield the results of the elements that this thread was free for."""
        queue = self.queues[self.name]
        while queue:
            try:
                element = queue.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                yield from self.dofn.process(element)
            except BaseException:
                queue.clear()  # the run has failed
                raise


@contextmanager
def _in_turn(elements: Sequence[Any], dofn: beam.DoFn) -> Iterator[tuple[Sequence[int], _Exhaust]]:
    """Elements and DoFn of a pipeline in which each thread does the next shard when it is free."""
    name = uuid.uuid4().hex
    _Exhaust.queues[name] = deque(elements)
    try:
        yield range(len(elements)), _Exhaust(name, dofn)
    finally:
        del _Exhaust.queues[name]


@contextmanager
def _watching(watch: ShardProgress) -> Iterator[None]:
    """Show progress in a thread, since Beam's `run` blocks without progress."""
    reports, begun = WorkerReports(watch.store, watch.reports), time.monotonic()
    total, count, stop = sum(watch.sizes.values()), len(watch.sizes), threading.Event()

    def report() -> None:
        try:
            found = reports.done()
        except Exception as error:  # stores raise any type; the pipeline itself fails if they do
            log.debug("no progress was read: %s", one_line(error))
            return
        done, seconds = found.rows(watch.sizes), time.monotonic() - begun
        shown = f"{len(found.shards):,} of {count:,} shards"
        text = progress_text(done, total, shown, watch.unit, found.counts, seconds)
        watch.progress(done, total, text)

    def poll() -> None:
        while not stop.wait(0.5 if watch.store.is_local else 10.0):
            report()

    # The caller's context variables hold the Prefect run that displays the progress.
    context = contextvars.copy_context()
    watcher = threading.Thread(target=context.run, args=(poll,), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
    reports.flush()
    report()


def _plain(error: Exception, known: tuple[type[Exception], ...]) -> Exception | None:
    """The original error in a Beam error, or None; Beam preserves most errors as text only."""
    text = str(error)
    for kind in known:
        message = text if type(error) is kind else None
        if message is None:
            found = re.search(rf"\b{kind.__name__}: (.+?)(?: \[while running|\n|$)", text)
            message = found[1] if found else None
        if message is not None:
            return kind(message.split(" [while running")[0])
    if FULL.search(text):
        return StorageAway(f"beam: a worker's disk is full ({one_line(error)}): free some space")
    if LOST.search(f"{type(error).__name__}: {text}"):
        return WorkersLost(f"beam: workers were lost ({one_line(error)}): run again for the rest")
    return None
