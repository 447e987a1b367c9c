"""Prepare the process of a flow: its logs, its end by an interruption, the loss of its console."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from typing import Any

from prefect.exceptions import TerminationSignal
from rich.console import Console

from flows.end_cancelled_run import end_run_if_cancelled
from flows.logs import log_to_prefect

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
