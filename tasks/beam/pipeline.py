"""Run one DoFn over many shards as a Beam pipeline, on the recipe's runner, and report progress.

The `beam` options of a recipe are those that Beam documents as its flags. A DoFn runs for a store
under the flow's lock, with errors as in other stages. Workers are refused if their code or packages
differ from the flow's: their shards could differ, too. Beam is imported without its warning about
an optional Google client.
"""

from __future__ import annotations

import contextvars
import difflib
import errno
import io
import logging
import re
import shutil
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from typing import Any, ClassVar

from artifacts.lock import Claim, LockLost, held_claim
from artifacts.store import Store
from configs.errors import Away, Failed, Refused
from configs.secrets import one_line
from tasks.beam import workers
from tasks.build_or_reuse import storing
from tasks.code_version import versions

with workers.quiet_import():
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions
    from apache_beam.runners.worker import sdk_worker

#: The default runner. Beam's own default first tries to download another one.
RUNNER = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"
DASK = "apache_beam.runners.dask.dask_runner.DaskRunner"
#: Loggers that repeat an error before it is raised, or report each lost connection.
LOUD = ("apache_beam", "distributed", "distributed.client", "distributed.gc", "tornado.application")
log = logging.getLogger("kiln")

# It prints each error's traceback, also once the pipeline has ended by that of another thread.
sdk_worker.print = lambda text, **_: log.debug("%s", text)


@contextmanager
def quiet_beam() -> Iterator[None]:
    """Silence the loggers of Beam and Dask: run_linear raises what matters."""
    before = {name: logging.getLogger(name).level for name in LOUD}
    for name in LOUD:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with workers.quiet_import():  # a job's messages go to the root logger
            yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@quiet_beam()
def make_pipeline(options: Mapping[str, Any], *, threads: int = 1) -> beam.Pipeline:
    """An empty pipeline.

    Args:
        options: Beam's flags without `--`; without `runner`, RUNNER is used.
        threads: concurrent shards on the default runner, unless `options` override it. Threads
            avoid the import time and the memory of processes.

    Raises:
        Refused: Beam rejects the options.
    """
    chosen = {**_defaults(options, threads), **options}
    if workers.is_dask(options):
        chosen["runner"] = DASK
    message = io.StringIO()  # argparse prints an invalid value and exits
    try:
        with redirect_stderr(message):
            pipeline = beam.Pipeline(options=PipelineOptions.from_dictionary(chosen))
            # Beam makes it for transforms of other languages, and deletes it only after `with`.
            shutil.rmtree(pipeline.local_tempdir, ignore_errors=True)
            _check_names(options)
            pipeline.options.get_all_options()
    except Refused:
        raise
    except Exception as error:  # any type: a runner may ask its service
        raise Refused(
            f"beam: runner {chosen['runner']} cannot be used: {one_line(error)}"
        ) from error
    except SystemExit:
        why = message.getvalue().strip().rpartition("error: ")[2]
        raise Refused(f"beam: {why.removeprefix('argument --')}") from None
    return pipeline


def _defaults(options: Mapping[str, Any], threads: int) -> dict[str, Any]:
    if workers.is_dask(options):
        sized = {"dask_npartitions", "dask_partition_size"} & options.keys()
        # One shard per task: the next worker that is free does the next one.
        return {} if sized else {"dask_partition_size": 1}
    if "runner" in options:
        return {}
    mode = "in_memory" if options.get("direct_num_workers", threads) == 1 else "multi_threading"
    return {"runner": RUNNER, "direct_running_mode": mode, "direct_num_workers": threads}


def _check_names(options: Mapping[str, Any]) -> None:
    """Raise Refused for an unknown option, which Beam ignores silently.

    The runner's module must be loaded, since it defines options of its own. A job service has
    further options; an unknown option that resembles no known option may be its own.
    """
    parsers: list[Any] = []
    PipelineOptions([]).get_all_options(add_extra_args_fn=parsers.append)
    known = {flag.lstrip("-") for flag in parsers[0]._option_string_actions}
    has_service = workers.uses_job_service(options)
    for name in options.keys() - known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8 if has_service else 0.6)
        if has_service and not near:
            continue
        hint = f" (did you mean beam.{near[0]}?)" if near else ""
        raise Refused(f"beam.{name}: unknown to Beam and this runner{hint}")


class OnStore(beam.DoFn):
    """Runs another DoFn, which writes to a store.

    Beam keeps an error's text alone, so this converts the store's errors before Beam sees them.

    Args:
        dofn: the other DoFn.
        store: URL of its store.
        claim: the claim of the flow's lock, checked for each element; None: there is no lock.
    """

    def __init__(self, dofn: beam.DoFn, store: str, claim: Claim | None) -> None:
        self.dofn = dofn
        self.store = store
        self.claim = claim

    def process(self, element: Any) -> Iterator[Any]:
        """Yield the DoFn's results. Raises LockLost, Failed, and what the DoFn raises."""
        store = Store(self.store)
        with storing(store):
            if self.claim is not None:
                self.claim.check(store.fs)
            yield from self.dofn.process(element)


class OnEqualWorkers(beam.DoFn):
    """Runs another DoFn where code and packages are those of the process that created it."""

    def __init__(self, dofn: beam.DoFn) -> None:
        self.dofn = dofn
        self.versions = versions()

    def process(self, element: Any) -> Iterator[Any]:
        """Yield the DoFn's results. Raises Refused."""
        installed = versions()
        for name in sorted(installed.keys() | self.versions.keys()):
            if installed.get(name) != self.versions.get(name):
                raise Refused(
                    f"beam: the worker on {socket.gethostname()} has {name} {installed.get(name)}, "
                    f"the flow {self.versions.get(name)}: install the same (deploy/workers) on both"
                )
        yield from self.dofn.process(element)


#: Errors of runners that have lost workers, or the connection to their service.
LOST = re.compile(
    r"Channel closed prematurely|StatusCode\.(?:UNAVAILABLE|CANCELLED)|\bKilledWorker\b|"
    r"\bCommClosedError\b|Timed out (?:during|trying to)|\bFutureCancelledError\b"
)
#: The error of a runner that has no space for its own files.
FULL = re.compile(rf"\[Errno ({errno.ENOSPC}|{errno.EDQUOT})\]")
KNOWN = (Refused, LockLost, Away, Failed)


@dataclass(frozen=True)
class ShardProgress:
    """A pipeline's progress, as its workers report it."""

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
        counts = workers.shard_counts(0, failed, 0, is_new=False)
        self.show(sum(self.sizes.values()), len(self.sizes), counts, 0.0)

    def show(self, rows: int, shards: int, counts: Mapping[str, int], seconds: float) -> None:
        """Show how many rows and shards are done, `seconds` after the beginning."""
        total = sum(self.sizes.values())
        of_shards = f"{shards:,} of {len(self.sizes):,} shards"
        text = workers.progress_text(rows, total, of_shards, self.unit, counts, seconds)
        self.progress(rows, total, text)


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
        Refused: Beam rejects the options.
        LockLost: another builder took the lock of this thread over; no further shard was begun.
        Failed: the store is not writable; Away if it is full or does not answer.
        Away: a worker lacks memory, open files or ports.
        Refused: a worker has other code or packages than this process.
        Away: the runner lost workers; another run does the shards that are missing.
    """
    dofn = OnStore(dofn, watch.store.url, held_claim())
    pipeline = make_pipeline(options, threads=threads)
    in_threads = workers.workers_of(options) is workers.Workers.THREADS
    elsewhere = nullcontext((elements, OnEqualWorkers(dofn)))
    with _in_turn(elements, dofn) if in_threads else elsewhere as (inputs, do):
        shards = pipeline | beam.Create(list(inputs)) | beam.Reshuffle() | beam.ParDo(do)
        # With an output to wait for, Beam's job service notices that a worker is gone.
        _ = shards | "Results" >> beam.Reshuffle()
        with watching(watch):
            try:
                _run(pipeline, options)
            except Exception as error:
                raise _plain(error, (*known, *KNOWN)) or error from error


def _run(pipeline: beam.Pipeline, options: Mapping[str, Any]) -> None:
    preloaded: AbstractContextManager[Any] = nullcontext()
    if workers.is_dask(options):
        import dask

        # The workers of this run's own cluster import Beam quietly, before their first shard.
        preloaded = dask.config.set({"distributed.worker.preload": ["tasks.beam.pipeline"]})
    with preloaded:
        result = pipeline.run()
    try:
        result.wait_until_finish()
    finally:
        if hasattr(result, "client"):  # Dask's, which its runner leaves open
            result.client.close()


def dask_teardown(_worker: object) -> None:
    """Silence a Dask worker that closes: its last heartbeat, cut off, would print a traceback.

    Dask calls the function of this name in each preloaded module (distributed/preloading.py).
    """
    logging.getLogger("distributed.worker").setLevel(logging.CRITICAL)


class _Exhaust(beam.DoFn):
    """Runs another DoFn on elements of a shared queue, until that is empty; its own is ignored.

    Beam's threads would each have a fixed share of the elements, and wait for the slowest share.
    """

    queues: ClassVar[dict[str, deque[Any]]] = {}  # of this process; a pickled DoFn has the name

    def __init__(self, name: str, dofn: beam.DoFn) -> None:
        self.name = name
        self.dofn = dofn

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
def watching(watch: ShardProgress) -> Iterator[None]:
    """Show progress in a thread, since Beam's `run` blocks without progress."""
    reports = workers.WorkerReports(watch.store, watch.reports)
    begun = time.monotonic()
    stop = threading.Event()

    def report() -> None:
        try:
            work = reports.done()
        except Exception as error:  # stores raise any type; the pipeline itself fails if they do
            log.debug("no progress was read: %s", one_line(error))
            return
        seconds = time.monotonic() - begun
        watch.show(work.rows(watch.sizes), len(work.shards), work.counts, seconds)

    def poll() -> None:
        while not stop.wait(workers.EVERY_SECONDS[watch.store.is_local]):
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
        if type(error) is kind:
            return kind(text.split(" [while running")[0])
        name = re.escape(f"{kind.__module__}.{kind.__qualname__}")  # as in tracebacks
        if match := re.search(rf"\b{name}: (.+?)(?: \[while running|\n|$)", text):
            return kind(match[1])
    if FULL.search(text):
        return Away(f"beam: a worker's disk is full ({one_line(error)}): free some space")
    if LOST.search(f"{type(error).__name__}: {text}"):
        return Away(f"beam: workers were lost ({one_line(error)}): run again for the rest")
    return None
