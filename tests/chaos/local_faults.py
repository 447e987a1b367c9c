"""Faults of a local disk, in the process that they happen to: an audit hook sees each request."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from chaos.faults import Fault

#: Python's audit event -> the call that it announces; these change a folder.
CHANGES: dict[str, Callable[..., Any]] = {
    "os.link": os.link,
    "os.mkdir": os.mkdir,
    "os.remove": os.unlink,
    "os.rename": os.rename,
    "os.symlink": os.symlink,
}
SEEN = {"open", "os.listdir", "os.utime", *CHANGES}
#: How many requests in turn find no space.
FULL = 3


class LocalFaults:
    """Counts this process' requests below `root`, and makes each fault happen when its turn comes.

    Args:
        fired: called with each fault before it happens.
        jump: shifts the clocks of this process by so many seconds.
    """

    def __init__(
        self,
        root: str,
        faults: list[Fault],
        fired: Callable[[Fault], None],
        jump: Callable[[Fault], None],
    ) -> None:
        self._root, self._faults, self._fired, self._jump = root, faults, fired, jump
        self._count, self._away, self._full = 0, 0.0, 0
        self._alone = threading.RLock()
        self._own = threading.local()  # requests made by a fault itself are not counted

    def install(self) -> None:
        """From here on: a hook cannot be removed."""
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in SEEN or getattr(self._own, "busy", False):
            return
        path = args[0]
        if not isinstance(path, str) or not path.startswith(self._root):
            return
        self._own.busy = True
        try:
            self._request(event, args, path)
        finally:
            self._own.busy = False

    def _request(self, event: str, args: tuple[Any, ...], path: str) -> None:
        writes = event in CHANGES or (event == "open" and _writes(args))
        with self._alone:
            if time.monotonic() < self._away:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            if self._full and (writes or path.endswith(".tmp")):
                self._full -= 1
                _no_space(event, path)
            self._count += 1
            fault = self._due(event, writes)
            if fault is None:
                return
            self._count = 0
            self._faults.pop(0)
            self._fired(fault)
        self._happen(fault, event, args, path)

    def _due(self, event: str, writes: bool) -> Fault | None:
        if not self._faults or self._count < self._faults[0].after:
            return None
        needs = {"no space": writes, "answer lost": event in CHANGES and event != "os.symlink"}
        return self._faults[0] if needs.get(self._faults[0].kind, True) else None

    def _happen(self, fault: Fault, event: str, args: tuple[Any, ...], path: str) -> None:
        if fault.kind in ("killed", "answer lost") and event in CHANGES and fault.choice < 0.7:
            with suppress(OSError):  # with effect; after a lost answer the request is repeated
                CHANGES[event](*(arg for arg in args if isinstance(arg, str)))
        match fault.kind:
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "paused":
                os.kill(os.getpid(), signal.SIGSTOP)  # the driver wakes it
            case "cut off":
                self._away = time.monotonic() + fault.seconds
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            case "request fails":
                number = errno.EIO if fault.choice < 0.5 else errno.ESTALE
                raise OSError(number, os.strerror(number), path)
            case "answer late":
                time.sleep(fault.seconds)
            case "no space":
                self._full = FULL
                _no_space(event, path)
            case "clock jumps":
                self._jump(fault)


def _writes(args: tuple[Any, ...]) -> bool:
    return bool(args[2] & (os.O_WRONLY | os.O_RDWR))


def _no_space(event: str, path: str) -> None:
    """Half of what was written is lost, if the disk learns only at the sync that it is full."""
    if event == "open" and path.endswith(".tmp"):
        with suppress(OSError):
            os.truncate(path, os.stat(path).st_size // 2)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
