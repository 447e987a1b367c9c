"""Run one DoFn over many shards, on whatever Beam runner the recipe names, and watch the store."""

from __future__ import annotations

import contextvars
import difflib
import errno
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from artifacts.store import Store
from tasks.quiet import quiet_import

with quiet_import():
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions

#: Named, because Beam's own default first tries to download another runner.
RUNNER = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"
FULL_OR_CLOSED = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


class BeamOptionsError(ValueError):
    """The recipe's `beam` section has what Beam or the runner does not take."""


@dataclass(frozen=True)
class Watch:
    """What a pipeline's progress is read from: the records of the shards that it commits."""

    store: Store
    stage: str
    sizes: Mapping[str, int]  # shard key -> rows
    progress: Callable[[int, int, str], None]
    unit: str = "rows"


def check_options(options: Mapping[str, Any]) -> None:
    """Raise BeamOptionsError, before any work, for a runner or options that Beam does not take."""
    with _quiet_beam():
        _pipeline(options, threads=1)


def run_linear(
    elements: Sequence[Any],
    dofn: beam.DoFn,
    options: Mapping[str, Any],
    watch: Watch,
    *,
    threads: int = 1,
    known: tuple[type[Exception], ...] = (),
) -> None:
    """Create → Reshuffle → ParDo: the one shape that every runner, Dask too, gets right.

    Results go by way of the store, as not every runner hands back values or counters.

    Args:
        options: Beam's own; unless they name a runner it is the direct one.
        threads: shards at a time on the direct runner, unless `options` say otherwise. Threads,
            not processes: those would bring seconds of imports and hundreds of megabytes each.
        known: errors of the DoFn that come back as themselves, with their one line.

    Raises:
        BeamOptionsError: options that Beam does not take.
        OSError: a store that is full or closed.
    """
    with _quiet_beam():
        pipeline = _pipeline(options, threads)
        _ = pipeline | beam.Create(list(elements)) | beam.Reshuffle() | beam.ParDo(dofn)
    with _quiet_beam(), _watching(watch):
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
        reason = " ".join(str(error).split())[:300]
        raise BeamOptionsError(
            f"beam: runner {chosen['runner']} cannot be used: {reason}"
        ) from error
    # Beam drops what it does not know; the runner, now loaded, has added what it knows.
    known = PipelineOptions([]).get_all_options()
    for name in options.keys() - known.keys():
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean beam.{near[0]}?)" if near else ""
        raise BeamOptionsError(f"beam.{name}: unknown to Beam and this runner{hint}")
    return pipeline


@contextmanager
def _quiet_beam() -> Iterator[None]:
    """Beam logs a failure's traceback several times over before it raises it."""
    logger = logging.getLogger("apache_beam")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _watching(watch: Watch) -> Iterator[None]:
    """Report committed shards while the pipeline runs, for `run` blocks and tells nothing."""
    sizes = {f"{key}.json": rows for key, rows in watch.sizes.items()}
    total, stop = sum(sizes.values()), threading.Event()

    def look() -> None:
        there = sizes.keys() & names_in(watch.store, watch.store.shards_path(watch.stage))
        done = sum(sizes[name] for name in there)
        text = f"{done:,} of {total:,} {watch.unit}, {len(there)} of {len(sizes)} shards"
        watch.progress(done, total, text)

    def watching() -> None:
        while not stop.wait(0.5 if watch.store.is_local else 10.0):
            try:
                look()
            except OSError:
                continue  # the pipeline itself will say what is wrong with the store

    # In the caller's context, which knows the Prefect run that progress is shown in.
    context = contextvars.copy_context()
    watcher = threading.Thread(target=context.run, args=(watching,), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
    look()


def names_in(store: Store, path: str) -> set[str]:
    """Names of what is in a folder of the store now, whatever was listed before."""
    store.fs.invalidate_cache(path)
    try:
        return {str(name).rpartition("/")[2] for name in store.fs.ls(path, detail=False)}
    except FileNotFoundError:
        return set()


def _plain(error: Exception, store: Store, known: tuple[type[Exception], ...]) -> Exception | None:
    """The cause that a person can act on; Beam hands over most errors as text only."""
    text = str(error)
    number = re.search(r"\[Errno (\d+)\]", text)
    if number is not None and int(number[1]) in FULL_OR_CLOSED:
        place = re.findall(r"\[Errno \d+\] [^:\n]+: '([^'\n]+)'", text)
        code = int(number[1])
        return OSError(code, os.strerror(code), place[-1] if place else store.root)
    for kind in known:
        words = text if type(error) is kind else None
        if words is None:
            found = re.search(rf"\b{kind.__name__}: (.+?)(?: \[while running|\n|$)", text)
            words = found[1] if found else None
        if words is not None:
            return kind(words.split(" [while running")[0])
    return None
