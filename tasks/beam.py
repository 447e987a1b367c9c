"""Run one DoFn over many shards on the recipe's Beam runner, and report progress."""

from __future__ import annotations

import contextvars
import difflib
import errno
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from artifacts.store import Store
from configs.redact_errors_and_logs import one_line
from tasks.quiet_import import quiet_import
from tasks.worker_reports import WorkerReports, progress_text

with quiet_import():
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions

#: The default runner. Beam's own default first tries to download another one.
RUNNER = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"
FULL_OR_CLOSED = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


class BeamOptionsError(ValueError):
    """The recipe's `beam` section has a runner or an option that Beam rejects."""


@dataclass(frozen=True)
class ShardProgress:
    """A pipeline's progress, as its workers report it (worker_reports.py)."""

    store: Store
    reports: str  # folder of the workers' reports
    sizes: Mapping[str, int]  # shard key -> rows
    progress: Callable[[int, int, str], None]
    unit: str = "rows"


@contextmanager
def _quiet_beam() -> Iterator[None]:
    """Silence Beam's logger, which prints a traceback several times before raising it."""
    logger = logging.getLogger("apache_beam")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@_quiet_beam()
def check_options(options: Mapping[str, Any]) -> None:
    """Raise BeamOptionsError for a runner or options that Beam rejects; nothing is run."""
    _pipeline(options, threads=1)


@_quiet_beam()
def run_linear(
    elements: Sequence[Any],
    dofn: beam.DoFn,
    options: Mapping[str, Any],
    watch: ShardProgress,
    *,
    threads: int = 1,
    known: tuple[type[Exception], ...] = (),
) -> None:
    """Run Create → Reshuffle → ParDo, a pipeline shape that every runner supports.

    The DoFn writes its results to the store, since not every runner returns values or counters.

    Args:
        options: Beam pipeline options; without `runner`, RUNNER is used.
        threads: concurrent shards on the default runner, unless `options` override it. Threads
            avoid the import time and the memory of processes.
        known: exception types of the DoFn that are raised again with their message.

    Raises:
        BeamOptionsError: Beam rejects the options.
        OSError: the store is full or not writable.
    """
    pipeline = _pipeline(options, threads)
    _ = pipeline | beam.Create(list(elements)) | beam.Reshuffle() | beam.ParDo(dofn)
    with _watching(watch):
        try:
            pipeline.run().wait_until_finish()
        except Exception as error:
            raise _plain(error, watch.store, known) or error from error


def _pipeline(options: Mapping[str, Any], threads: int) -> beam.Pipeline:
    chosen = dict(options)
    if "runner" not in chosen:
        mode = "multi_threading" if threads > 1 else "in_memory"
        direct = {"direct_running_mode": mode, "direct_num_workers": threads}
        chosen = {"runner": RUNNER, **direct, **options}
    try:
        pipeline = beam.Pipeline(options=PipelineOptions([], **chosen))
    except (AttributeError, ImportError, RuntimeError, TypeError, ValueError) as error:
        raise BeamOptionsError(
            f"beam: runner {chosen['runner']} cannot be used: {one_line(error)}"
        ) from error
    # Beam ignores unknown options silently. The runner is loaded now, so its options are known.
    known = PipelineOptions([]).get_all_options()
    for name in options.keys() - known.keys():
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean beam.{near[0]}?)" if near else ""
        raise BeamOptionsError(f"beam.{name}: unknown to Beam and this runner{hint}")
    return pipeline


@contextmanager
def _watching(watch: ShardProgress) -> Iterator[None]:
    """Show progress in a thread, since Beam's `run` blocks without progress."""
    reports, begun = WorkerReports(watch.store, watch.reports), time.monotonic()
    total, count, stop = sum(watch.sizes.values()), len(watch.sizes), threading.Event()

    def report() -> None:
        found = reports.done()
        done, seconds = found.rows(watch.sizes), time.monotonic() - begun
        shown = f"{len(found.shards):,} of {count:,} shards"
        text = progress_text(done, total, shown, watch.unit, found.counts, seconds)
        watch.progress(done, total, text)

    def poll() -> None:
        while not stop.wait(0.5 if watch.store.is_local else 10.0):
            try:
                report()
            except OSError:
                continue  # the pipeline itself reports a broken store

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


def _plain(error: Exception, store: Store, known: tuple[type[Exception], ...]) -> Exception | None:
    """The original error in a Beam error, or None; Beam preserves most errors as text only."""
    text = str(error)
    number = re.search(r"\[Errno (\d+)\]", text)
    if number is not None and int(number[1]) in FULL_OR_CLOSED:
        paths = re.findall(r"\[Errno \d+\] [^:\n]+: '([^'\n]+)'", text)
        code = int(number[1])
        return OSError(code, os.strerror(code), paths[-1] if paths else store.root)
    for kind in known:
        message = text if type(error) is kind else None
        if message is None:
            found = re.search(rf"\b{kind.__name__}: (.+?)(?: \[while running|\n|$)", text)
            message = found[1] if found else None
        if message is not None:
            return kind(message.split(" [while running")[0])
    return None
