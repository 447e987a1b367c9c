"""`python -P -m runtimes JOB.json`: do one job in this process, and say by exit code how it went.
`python -P -m runtimes --probe RUNTIME` prints what that runtime finds here, as JSON;
`python -P -m runtimes --check RUNTIME SETTINGS` what of train settings it cannot serve;
`python -P -m runtimes --encode SOCKET` encodes for the process that started it (encode/server.py).

With `-P` a user's own `configs` or `tasks` in the working directory is not taken for ours.

Exit codes: 0 done; 2 wrong input; 143 stopped when asked to, with no step lost; 1 anything else.

Where the job asks for more processes, this one is the first and starts the others; or torchrun,
mpirun or msrun starts all of them. The first one alone speaks, and writes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from artifacts.models import ModelNotFound, resolve_model
from configs.training import Train
from runtimes.contract import WrongInput
from runtimes.encode.server import serve
from runtimes.process.events import Events
from runtimes.process.job import Job, TrainJob, read_job
from runtimes.process.launcher import Launcher, LostRank
from runtimes.process.ranks import Ranks, adopt_mpi, is_follower, is_msrun_scheduler, launched
from runtimes.process.signals import STOPPED, Stop
from runtimes.registry import check_settings_here, probe_here
from runtimes.sample.generate import generate
from runtimes.train.divergence import Diverged
from runtimes.train.trainer import read_settings, train


class _ToEvents(logging.Handler):
    """Warnings of our own code reach the stage as events."""

    def __init__(self, events: Events) -> None:
        super().__init__(logging.WARNING)
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        self._events.emit("warning", message=record.getMessage())


def main(arguments: list[str]) -> int:
    """Do the job in the file named by the one argument, or print what a runtime finds here."""
    if arguments[:1] == ["--probe"] and len(arguments) == 2:
        print(json.dumps(asdict(probe_here(arguments[1]))))
        return 0
    if arguments[:1] == ["--check"] and len(arguments) == 3:
        print(json.dumps({"wrong": _wrong_with(arguments[1], json.loads(arguments[2]))}))
        return 0
    if arguments[:1] == ["--encode"] and len(arguments) == 2:
        serve(int(arguments[1]))
        return 0
    if len(arguments) != 1:
        print("usage: python -P -m runtimes JOB.json (others: see its docstring)", file=sys.stderr)
        return 2
    events, stop = Events(), Stop()
    try:
        adopt_mpi()
    except WrongInput as error:
        return _fail(events, str(error), 2, wrong_input=True)
    if is_msrun_scheduler():
        from runtimes.mindspore import rendezvous

        rendezvous.serve()
        return 0
    stop.listen()
    speaker = f"process {Ranks.here().rank}: " if is_follower() else ""
    logging.basicConfig(format=f"{speaker}%(message)s", level=logging.WARNING)
    logging.getLogger("kiln").addHandler(_ToEvents(events))
    try:
        return _do(read_job(Path(arguments[0])), Path(arguments[0]), events, stop)
    except WrongInput as error:
        return _fail(events, str(error), 2, wrong_input=True)
    except OSError as error:
        return _fail(events, str(error), 1, errno=error.errno)
    except Diverged as error:
        return _fail(events, str(error), 1)
    except LostRank as error:
        return _fail_for(error, events)
    except Exception as error:
        return _fail(events, f"{type(error).__name__}: {error}", 1, trace=traceback.format_exc())


def _wrong_with(name: str, settings: dict[str, Any]) -> str | None:
    try:
        check_settings_here(name, Train(**settings))
    except WrongInput as error:
        return str(error)
    return None


def _do(job: Job, path: Path, events: Events, stop: Stop) -> int:
    job = _with_local_models(job)
    if not isinstance(job, TrainJob):
        events.emit("result", **generate(job, events))
        return 0
    if not Ranks.here().first:
        done = train(job, events, stop)
        events.emit("result")  # to the first process, which alone can tell that we are not lost
    else:
        with only_writer(job.work), Launcher(path, _processes(job), partial(_give_up, events)):
            done = train(job, events, stop)
    return 0 if done else STOPPED


def _with_local_models(job: Job) -> Job:
    """The job with its models on this machine. Raises WrongInput."""
    try:
        vae = None if job.vae is None else str(resolve_model(job.vae))
        return replace(job, model=str(resolve_model(job.model)), vae=vae)
    except ModelNotFound as error:
        raise WrongInput(str(error)) from None


def _processes(job: TrainJob) -> int:
    """How many this one and those that it starts are to be. Raises WrongInput."""
    settings = read_settings(job)
    started = launched()
    count = Ranks.here().world if started else settings.processes
    if settings.global_batch_size % count:
        raise WrongInput(
            f"train.global_batch_size {settings.global_batch_size} cannot be shared by {count} "
            "processes: make it a multiple"
        )
    return 1 if started else count


def _give_up(events: Events, lost: LostRank) -> None:
    """End this process from another thread: its own waits for a process that is no more."""
    code = _fail_for(lost, events)
    sys.stderr.flush()
    os._exit(code)


def _fail_for(lost: LostRank, events: Events) -> int:
    if lost.code == STOPPED:  # it was asked to before it had anything to save
        return STOPPED
    return _fail(
        events,
        str(lost),
        lost.code,
        wrong_input=lost.wrong_input,
        errno=lost.errno,
        trace=lost.traceback,
    )


def _fail(
    events: Events,
    message: str,
    code: int,
    *,
    wrong_input: bool = False,
    errno: int | None = None,
    trace: str = "",
) -> int:
    """Say it once: the first process tells what has failed in another, if that was the cause."""
    events.emit("error", message=message, wrong_input=wrong_input, errno=errno, traceback=trace)
    if not is_follower():
        print(f"{trace}error: {message}", file=sys.stderr)
    return code


@contextmanager
def only_writer(work: str) -> Iterator[None]:
    """Be the only process of this machine that writes a work folder.

    A process that outlives its stage (it is still writing a checkpoint, say) and the one started in
    its place wait for each other. The lock goes with the process, however that ends.
    """
    fs, root = url_to_fs(work)
    if isinstance(fs, LocalFileSystem):
        path = Path(root) / ".lock"
    else:
        path = Path(tempfile.gettempdir()) / f"kiln-{hashlib.sha256(work.encode()).hexdigest()}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logging.getLogger("kiln").warning("%s is still being written: waiting for it", work)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
