"""When a process must stop: SIGTERM or Ctrl-C, or the death of the process that started it."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from types import FrameType

from runtimes.process.events import EVENT_FD
from runtimes.process.ranks import is_follower

#: Exit code of a process that stopped when asked to: 128 + SIGTERM.
STOPPED = 143


class Stop:
    """The first signal asks, the second kills; the parent's death asks too, and never kills.

    Until `defer` is called there is nothing to save, and the first signal ends the process too.
    """

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False

    def listen(self) -> None:
        """Take over this process's signals; watch the process that started it, if one did."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        if EVENT_FD in os.environ:
            parent = os.getppid()
            threading.Thread(target=_watch, args=(self, parent), name="parent", daemon=True).start()

    def defer(self) -> None:
        """From now on the first signal only sets `requested`."""
        self._deferred = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self.requested = True
        if not self._deferred:
            sys.exit(STOPPED)


def _watch(stop: Stop, parent: int) -> None:
    """Take the parent's death for a SIGTERM: it is gone, or its end of our standard input is."""
    stdin = sys.stdin.fileno()
    alive = True
    while alive and os.getppid() == parent:
        readable, _, _ = select.select([stdin], [], [], 1.0)
        alive = not readable or bool(os.read(stdin, 4096))
    if is_follower():  # the first process is gone, and only it could have saved anything
        os._exit(STOPPED)
    if not stop.requested:  # a stage that dies after it has asked does not ask again
        os.kill(os.getpid(), signal.SIGTERM)
