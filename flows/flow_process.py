"""A flow's process in Prefect: its log lines, its cancellation, its interruptions.

A Prefect worker ends the cancelled runs of deployments. `kiln run` has no worker, and a worker may
be killed or miss the cancellation: then the flow's process ends itself. Each log line of Kilnworks
goes to the Prefect run of its thread, and all lines are without secrets.
"""

from __future__ import annotations

import _thread
import contextvars
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect import runtime
from prefect.client.base import ServerType
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import ObjectNotFound, TerminationSignal
from prefect.logging.handlers import APILogHandler
from prefect.states import Cancelled
from rich.console import Console

from configs.errors import UserError
from configs.secrets import redact_logs
from flows.task_limits import team_tags
from tasks.child_process import stopping

log = logging.getLogger("kiln")

#: Seconds between two looks at the run's state.
POLL_SECONDS = 10.0
#: Seconds that a worker has: it sends SIGTERM, and SIGKILL after 30 s.
WORKER_SECONDS = 120.0


def end_run_if_cancelled() -> None:
    """Watch the state of this thread's flow run in the background, until the run ends.

    Once it is cancelled, the process receives SIGTERM, as from a worker. A server that ends
    with the run is not asked: nobody sees its UI.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    if threading.current_thread() is not threading.main_thread():  # signals reach that thread alone
        return
    if context.client.server_type is ServerType.EPHEMERAL:
        return
    inherited = contextvars.copy_context()  # has the server's address, and the run for log lines
    threading.Thread(
        target=inherited.run, args=(_watch, context.flow_run), name="cancellation", daemon=True
    ).start()


def _watch(run: FlowRun) -> None:
    # Not the client of the run's own thread, whose connections that thread closes.
    with get_client(httpx_settings={}, sync_client=True) as client:
        seen: float | None = None  # seconds of this clock: the server's may differ by minutes
        while not _has_ended(run):
            time.sleep(POLL_SECONDS)
            try:
                state = client.read_flow_run(run.id).state
                if state is None or not (state.is_cancelling() or state.is_cancelled()):
                    seen = None
                    continue
                seen = time.monotonic() if seen is None else seen
                if _is_due(run, seen) and _ended(client, run, state):
                    return
            except ObjectNotFound:  # the run was deleted
                return
            except Exception as error:
                log.debug("the state of the run is unknown: %s", error)


def _is_due(run: FlowRun, seen: float) -> bool:
    """Whether no worker has ended a run since its cancellation was seen."""
    return run.deployment_id is None or time.monotonic() - seen > WORKER_SECONDS


def _ended(client: SyncPrefectClient, run: FlowRun, state: State) -> bool:
    """End the process of a cancelled run, unless a worker or a user does so."""
    if _is_ending(run):
        return False
    if not state.is_final():
        state = Cancelled(message="cancelled; the process ends by itself")
        client.set_flow_run_state(run.id, state, force=True)
        if _is_ending(run):  # since the request, which may have taken minutes
            return False
    log.warning("the run is cancelled in Prefect: it ends")
    run.state = state  # Prefect's engine replaces a state that is not final by Crashed
    os.kill(os.getpid(), signal.SIGTERM)
    return True


def _is_ending(run: FlowRun) -> bool:
    return stopping.is_set() or _has_ended(run)


def _has_ended(run: FlowRun) -> bool:
    return run.state is not None and run.state.is_final()


def name_run(model: str) -> None:
    """Name the run of a team's model by it, since teams may name recipes alike, and tag it."""
    context = FlowRunContext.get()
    if not (tags := team_tags(model)) or context is None or context.flow_run is None:
        return
    run = context.flow_run
    if model not in run.name:  # of a recipe
        run.name = f"{runtime.flow_run.flow_name} {model}"
    run.tags = sorted({*run.tags, *tags})
    with get_client(sync_client=True) as client:
        client.update_flow_run(run.id, name=run.name, tags=run.tags)


def log_to_prefect() -> None:
    """Add Prefect's handler to the `kiln` logger, once, and redact the lines of all loggers.

    Prefect logs wrong input as one line: its message says what to do.

    PREFECT_LOGGING_EXTRA_LOGGERS would add it without a level, and warn about other threads.
    """
    redact_logs()
    logger = logging.getLogger("kiln")
    if not any(isinstance(handler, APILogHandler) for handler in logger.handlers):
        handler = APILogHandler()
        # The thread of a heartbeat belongs to no run.
        handler.addFilter(lambda _: bool(FlowRunContext.get() or TaskRunContext.get()))
        logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_without_traceback)


@contextmanager
def each_line_once() -> Iterator[None]:
    """Log equal lines once, such as the warnings of a sweep's trials."""
    logger = logging.getLogger("kiln")
    seen = set[str]()

    def is_new(record: logging.LogRecord) -> bool:
        count = len(seen)
        seen.add(record.getMessage())
        return len(seen) > count

    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Take the traceback of wrong input out of a record, and keep that of a bug."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, UserError) and _is_wrong_input(error):
        record.exc_info = None
    return True


def _is_wrong_input(error: Exception) -> bool:
    return any(isinstance(cause, ValueError) for cause in (error, error.__cause__))


#: Seconds until an ignored interruption is raised again: the callback that ignored it has ended.
AGAIN_SECONDS = 0.1


def prepare_process() -> None:
    """Send log lines to Prefect; raise interruptions again that Python ignored; outlive a console.

    The handlers of SIGTERM (Prefect's) and SIGINT raise an exception wherever the main thread is.
    Python ignores all exceptions of finalizers and weak references' callbacks: the run would go on.

    The console of a run is a pipe to its worker. Once a worker is killed, rich would end the thread
    that logs, or the run.

    A run that is cancelled in Prefect ends, even if no worker ends it.
    """
    log_to_prefect()
    end_run_if_cancelled()
    Console.on_broken_pipe = _go_on_silently  # type: ignore[assignment,method-assign]
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _raise_again


def _raise_again(ignored: Any) -> None:
    numbers = {TerminationSignal: signal.SIGTERM, KeyboardInterrupt: signal.SIGINT}
    if (number := numbers.get(ignored.exc_type)) is None:
        sys.__unraisablehook__(ignored)
        return

    def send() -> None:
        time.sleep(AGAIN_SECONDS)
        os.kill(os.getpid(), number)

    # The interrupted code may hold the locks of `threading`.
    _thread.start_new_thread(send, ())


def _go_on_silently(console: Console) -> None:
    """Discard what is printed from now on, by others too; Prefect's server still gets the log."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), console.file.fileno())
