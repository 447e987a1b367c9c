"""Entry point of a runtime's process.

`python -P -m runtimes JOB.json` runs one job;
`python -P -m runtimes --probe RUNTIME` prints the runtime's Probe as JSON;
`python -P -m runtimes --check RUNTIME SETTINGS` prints the unsupported train setting as JSON.

`-P` keeps the working directory out of sys.path: a user's `configs` or `tasks` would shadow ours.

Exit codes: 0 success; 2 wrong input; 143 stopped on request, with all steps saved; 1 other errors.

For several processes, this process is the first of its host and starts the others there
(process/launcher.py), unless torchrun, mpirun or msrun has started them all. Rank 0 alone emits
events and writes files; the first process of another host emits its errors and warnings.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from artifacts.models import resolve_file, resolve_model
from configs.errors import Refused
from configs.settings.train import Train
from runtimes.detect_hardware import collect_garbage_rarely, raise_open_file_limit
from runtimes.process import launcher
from runtimes.process.errors import fail, report_error, warnings_to
from runtimes.process.job import Events, Job, TrainJob, read_job
from runtimes.process.questions import answer
from runtimes.registry import import_from
from runtimes.sample.generate_job import generate
from runtimes.train.training_loop import read_train_settings, train


def main(arguments: list[str]) -> int:
    """Run the command line `arguments` (without the program's name) and return the exit code."""
    collect_garbage_rarely()
    raise_open_file_limit()
    if arguments[:1] == ["--probe"] and len(arguments) == 2:
        answer(lambda: import_from(arguments[1], "device").probe())
        return 0
    if arguments[:1] == ["--check"] and len(arguments) == 3:
        answer(lambda: import_from(arguments[1], "device").check(Train(**json.loads(arguments[2]))))
        return 0
    if len(arguments) != 1:
        print("usage: python -P -m runtimes JOB.json (more: see its docstring)", file=sys.stderr)
        return 2
    if launcher.is_msrun_scheduler():
        from runtimes.mindspore import parallel

        parallel.serve()
        return 0
    events = Events()
    stop = launcher.Stop()
    try:
        launcher.adopt_mpi()
        stop.listen()
        prefix = f"process {launcher.Ranks.here().rank}: " if launcher.is_follower() else ""
        logging.basicConfig(format=f"{prefix}%(message)s", level=logging.WARNING)
        warnings_to(events)
        return _run(read_job(Path(arguments[0])), Path(arguments[0]), events, stop)
    except launcher.LostRank as error:
        return _fail_for(error, events)
    except Exception as error:
        return report_error(events, error)


def _run(job: Job, path: Path, events: Events, stop: launcher.Stop) -> int:
    job = _with_local_models(job)
    if not isinstance(job, TrainJob):
        host = launcher.Hosts.here().number if job.hosts > 1 else 0
        events.emit("result", **generate(job, events, host))
        return 0
    if not launcher.Ranks.here().first:
        done = train(job, events, stop)
        events.emit("result")  # tells the launcher that this process ended normally
    else:
        started = launcher.launched()
        hosts = launcher.Hosts() if started else launcher.Hosts.here()
        count = _processes(job, started, hosts)
        with (
            only_writer(job.work, hosts.number),
            launcher.Launcher(path, count, partial(_give_up, events), hosts),
        ):
            done = train(job, events, stop)
    return 0 if done else launcher.STOPPED


def _with_local_models(job: Job) -> Job:
    """The job with paths of local copies of its models. Raises Refused, Away."""
    vae = None if job.vae is None else str(resolve_model(job.vae))
    job = replace(job, model=str(resolve_model(job.model)), vae=vae)
    if isinstance(job, TrainJob):
        return job
    drawings = tuple(
        replace(
            drawing,
            parts={name: str(resolve_model(part)) for name, part in drawing.parts.items()},
            lora=None if drawing.lora is None else str(resolve_file(drawing.lora)),
        )
        for drawing in job.drawings
    )
    return replace(job, drawings=drawings)


def _processes(job: TrainJob, started: bool, hosts: launcher.Hosts) -> int:
    """Number of this host's processes for the launcher, this one included. Raises Refused.

    Args:
        started: whether all processes run already.
    """
    settings = read_train_settings(job)
    world = launcher.Ranks.here().world if started else hosts.count * settings.processes
    if settings.global_batch_size % world:
        raise Refused(
            f"train.global_batch_size {settings.global_batch_size} cannot be shared by {world} "
            "processes: make it a multiple"
        )
    return 1 if started else settings.processes


def _give_up(events: Events, lost: launcher.LostRank) -> None:
    """End this process from another thread: the main thread waits in a collective for ever."""
    code = _fail_for(lost, events)
    sys.stderr.flush()
    os._exit(code)


def _fail_for(lost: launcher.LostRank, events: Events) -> int:
    if lost.code == launcher.STOPPED:  # it received a stop request before its first checkpoint
        return launcher.STOPPED
    return fail(events, str(lost), lost.code, **lost.facts)


@contextmanager
def only_writer(work: str, host: int = 0) -> Iterator[None]:
    """Hold an exclusive lock on a work folder, among the processes of this machine.

    A process may outlive its stage while it writes a checkpoint; its successor waits for the lock.
    The kernel releases the lock when the process ends, even after SIGKILL.

    Args:
        work: URL of the folder.
        host: number of this host. Hosts of a run write together, perhaps on a shared disk, so each
            has its own lock.
    """
    fs, root = url_to_fs(work)
    suffix = f"-{host}" if host else ""
    if isinstance(fs, LocalFileSystem):
        path = Path(root) / f".lock{suffix}"
    else:
        digest = hashlib.sha256(work.encode()).hexdigest()
        path = Path(tempfile.gettempdir()) / f"kiln-{digest}{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        logging.getLogger("kiln").warning("another process writes %s: waiting for its lock", work)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except SystemExit as stopped:  # by a signal before the first step
        code = stopped.code if isinstance(stopped.code, int) else 1
    launcher.leave(code)
