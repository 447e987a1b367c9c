"""Prepare the process of a flow: its logs, and its interruptions."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from typing import Any

from prefect.exceptions import TerminationSignal

from flows.logs import log_to_prefect

#: Seconds until an ignored interruption is raised again: the callback that ignored it has ended.
AGAIN_SECONDS = 0.1


def prepare_process() -> None:
    """Send log lines to Prefect, and raise interruptions again that Python ignored.

    The handlers of SIGTERM (Prefect's) and SIGINT raise an exception wherever the main thread is.
    Python ignores all exceptions of finalizers and weak references' callbacks: the run would go on.
    """
    log_to_prefect()
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
