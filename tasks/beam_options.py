"""Beam pipelines from the `beam` options of a recipe, which Beam documents as its flags."""

from __future__ import annotations

import difflib
import io
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from typing import Any

from configs.secrets import one_line
from tasks.beam_workers import is_dask, uses_job_service
from tasks.import_beam_quietly import quiet_import

with quiet_import():
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


class BeamOptionsError(ValueError):
    """The recipe's `beam` section has a runner or an option that Beam rejects."""


@contextmanager
def quiet_beam() -> Iterator[None]:
    """Silence the loggers of Beam and Dask: run_linear raises what matters."""
    before = {name: logging.getLogger(name).level for name in LOUD}
    for name in LOUD:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with quiet_import():  # a job's messages go to the root logger
            yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@quiet_beam()
def check_options(options: Mapping[str, Any]) -> None:
    """Raise BeamOptionsError for a runner or options that Beam rejects; nothing is run."""
    make_pipeline(options)


def make_pipeline(options: Mapping[str, Any], *, threads: int = 1) -> beam.Pipeline:
    """An empty pipeline.

    Args:
        options: Beam's flags without `--`; without `runner`, RUNNER is used.
        threads: concurrent shards on the default runner, unless `options` override it. Threads
            avoid the import time and the memory of processes.

    Raises:
        BeamOptionsError: Beam rejects the options.
    """
    chosen = {**_defaults(options, threads), **options}
    if is_dask(options):
        chosen["runner"] = DASK
    message = io.StringIO()  # argparse prints an invalid value and exits
    try:
        with redirect_stderr(message):
            pipeline = beam.Pipeline(options=PipelineOptions.from_dictionary(chosen))
            # Beam makes it for transforms of other languages, and deletes it only after `with`.
            shutil.rmtree(pipeline.local_tempdir, ignore_errors=True)
            _check_names(options)
            pipeline.options.get_all_options()
    except BeamOptionsError:
        raise
    except Exception as error:  # of any type: a runner may ask its service
        raise BeamOptionsError(
            f"beam: runner {chosen['runner']} cannot be used: {one_line(error)}"
        ) from error
    except SystemExit:
        why = message.getvalue().strip().rpartition("error: ")[2]
        raise BeamOptionsError(f"beam: {why.removeprefix('argument --')}") from None
    return pipeline


def _defaults(options: Mapping[str, Any], threads: int) -> dict[str, Any]:
    if is_dask(options):
        sized = {"dask_npartitions", "dask_partition_size"} & options.keys()
        # One shard per task: the next worker that is free does the next one.
        return {} if sized else {"dask_partition_size": 1}
    if "runner" in options:
        return {}
    mode = "in_memory" if options.get("direct_num_workers", threads) == 1 else "multi_threading"
    return {"runner": RUNNER, "direct_running_mode": mode, "direct_num_workers": threads}


def _check_names(options: Mapping[str, Any]) -> None:
    """Raise BeamOptionsError for an unknown option, which Beam ignores silently.

    The runner's module must be loaded, since it defines options of its own. A job service has
    further options; an unknown one that resembles no known one may be its own.
    """
    parsers: list[Any] = []
    PipelineOptions([]).get_all_options(add_extra_args_fn=parsers.append)
    known = {flag.lstrip("-") for flag in parsers[0]._option_string_actions}
    has_service = uses_job_service(options)
    for name in options.keys() - known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8 if has_service else 0.6)
        if has_service and not near:
            continue
        hint = f" (did you mean beam.{near[0]}?)" if near else ""
        raise BeamOptionsError(f"beam.{name}: unknown to Beam and this runner{hint}")
