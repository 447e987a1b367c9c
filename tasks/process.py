"""Run a job in a process of its own: events in, log out, and no orphan left behind."""

from __future__ import annotations

import contextvars
import json
import logging
import os
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from runtimes.contract import WrongInput
from runtimes.process.events import EVENT_FD
from runtimes.process.job import Job, write_job
from runtimes.process.signals import STOPPED
from runtimes.registry import interpreter
from tasks.stage import TransientError

log = logging.getLogger("kiln")
Event = dict[str, Any]


class JobFailed(RuntimeError):
    """The process failed; the message has its last words."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def run_job(
    job: Job,
    on_event: Callable[[Event], None] = lambda event: None,
    *,
    grace_seconds: float = 60.0,
) -> Event:
    """Run `python -P -m runtimes JOB.json` and return the fields of its `result` event.

    The process, and those it starts, have a session of their own, so that only we signal them. When
    we are interrupted (Ctrl-C, a cancelled Prefect run) they get SIGTERM, `grace_seconds` to
    checkpoint in, then SIGKILL. When we are killed, its standard input ends, which it takes for
    SIGTERM.

    Raises:
        WrongInput: the job cannot be done as asked.
        OSError: it could not write, for want of space, say.
        TransientError: somebody else told it to stop; it left a checkpoint.
        JobFailed: it failed otherwise.
    """
    with tempfile.TemporaryDirectory(prefix="kiln-job-") as folder:
        path = Path(folder) / "job.json"
        write_job(job, path)
        events_read, events_write = os.pipe()
        child = subprocess.Popen(
            [interpreter(job.runtime), "-P", "-u", "-m", "runtimes", str(path)],
            env={**os.environ, EVENT_FD: str(events_write)},
            pass_fds=(events_write,),
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        os.close(events_write)
        heard = Heard(on_event)
        with os.fdopen(events_read) as events:
            pumps = (lambda: heard.events(events), lambda: heard.log(child.stdout))
            return attend(child, heard, pumps, lambda: _stop(child, grace_seconds))


class Heard:
    """What a runtime's process has said: its events, and the last lines of its log."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self.kept: dict[str, Event] = {}  # the last of each kind
        self.last_words: deque[str] = deque(maxlen=20)
        self._on_event = on_event

    def events(self, lines: Iterable[str]) -> None:
        """Take lines that are events; one cut off by a kill is left out."""
        for line in lines:
            self._event(line)

    def log(self, lines: Iterable[str] | None) -> None:
        """Take lines that are not."""
        for line in lines or ():
            self._say(line)

    def mixed(self, lines: Iterable[str] | None) -> None:
        """Take lines of both kinds."""
        for line in lines or ():
            if not self._event(line):
                self._say(line)

    def _event(self, line: str) -> bool:
        try:
            event = json.loads(line)
            kind = event["event"]
        except (ValueError, TypeError, KeyError):
            return False
        self.kept[kind] = event
        if kind == "warning":
            log.warning("%s", event["message"])
        try:
            self._on_event(event)
        except Exception:  # a display that fails must not block the pipe that the child writes to
            log.exception("an event could not be shown")
        return True

    def _say(self, line: str) -> None:
        if text := line.rstrip():
            self.last_words.append(text)
            log.debug("%s", text)


def attend(
    child: subprocess.Popen[str],
    heard: Heard,
    pumps: Iterable[Callable[[], None]],
    stop: Callable[[], None],
) -> Event:
    """Wait for a process that does a job, and return its `result`; see run_job for what it raises.

    Args:
        pumps: read what it says, to the end.
        stop: has it stop, when we are interrupted.
    """
    threads = [_pump(read) for read in pumps]
    try:
        code = child.wait()
        if code != 0:
            _signal_group(child, signal.SIGKILL)  # other processes of the run, were any left
    except BaseException:
        stop()
        raise
    finally:
        if child.stdin is not None:
            child.stdin.close()
        # The child is gone, so both pipes end; a display that is slow only takes longer.
        for thread in threads:
            thread.join()
    if code == 0 and "result" in heard.kept:
        return heard.kept["result"]
    raise _failure(code, heard.kept.get("error", {}), "\n".join(heard.last_words))


def _failure(code: int, error: Event, last_words: str) -> Exception:
    message = error.get("message")
    if error.get("wrong_input"):
        return WrongInput(message)
    if error.get("errno"):  # a full disk, say: the stage knows what to do about it
        return OSError(error["errno"], message)
    if code == STOPPED:
        return TransientError("the runtime's process was told to stop; run again to go on")
    ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    words = message or last_words
    return JobFailed(f"the runtime's process {ended}" + (f": {words}" if words else ""), code)


def _pump(read: Callable[[], None]) -> threading.Thread:
    """A reading thread that still knows which Prefect run it belongs to."""
    thread = threading.Thread(target=contextvars.copy_context().run, args=(read,), daemon=True)
    thread.start()
    return thread


def _stop(child: subprocess.Popen[str], grace_seconds: float) -> None:
    log.info("stopping the runtime's process (it has %g s to checkpoint)", grace_seconds)
    _signal_group(child, signal.SIGTERM)
    try:
        child.wait(grace_seconds)
    except BaseException:
        _signal_group(child, signal.SIGKILL)
        child.wait()


def _signal_group(child: subprocess.Popen[str], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)
