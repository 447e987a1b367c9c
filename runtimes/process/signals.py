"""Stop requests: SIGTERM, SIGINT (Ctrl-C), or the death of the parent process."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from types import FrameType

from runtimes.process.events import EVENT_FD
from runtimes.process.ranks import is_follower

#: Signals that request a stop.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: Exit code after a stop request: 128 + SIGTERM.
STOPPED = 143


class Stop:
    """A stop request. The first signal requests a stop; the second one kills the process.

    The parent's death, or its byte on our standard input, requests a stop and never kills. Before
    `defer` there is no progress to save, so the first signal ends the process at once.

    Attributes:
        requested: whether the process must stop at the next step.
    """

    def __init__(self) -> None:
        self.requested = False
        self._signalled = False
        self._deferred = False

    def listen(self) -> None:
        """Install the signal handlers; watch the parent if it is a stage or a launcher."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        if EVENT_FD in os.environ:
            parent = os.getppid()
            threading.Thread(target=_watch, args=(self, parent), name="parent", daemon=True).start()

    def defer(self) -> None:
        """From now on, the first signal only sets `requested`; the loop then saves and exits."""
        self._deferred = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signalled:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self._signalled = self.requested = True
        if not self._deferred:
            sys.exit(STOPPED)


def _watch(stop: Stop, parent: int) -> None:
    """Send this process SIGTERM when the parent dies or closes our standard input."""
    stdin = sys.stdin.fileno()
    alive = True
    while alive and os.getppid() == parent:
        readable, _, _ = select.select([stdin], [], [], 1.0)
        if readable:
            alive = bool(os.read(stdin, 4096))
            if alive:  # the launcher passes on rank 0's stop by a byte
                stop.requested = True
    if is_follower():  # rank 0 has died, and no other rank writes checkpoints
        os._exit(STOPPED)
    if not stop.requested:  # otherwise the parent's death after its SIGTERM would kill
        os.kill(os.getpid(), signal.SIGTERM)
