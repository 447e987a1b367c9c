"""Child processes that leave no orphan: a job with events and a log, and a process behind sockets.

A ConnectedProcess answers requests until its client ends; an encoder or a network runs in it, in an
environment of its own.
"""

from __future__ import annotations

import contextvars
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from artifacts.lock import LockLost, check_held
from configs.errors import Away, Failed, Refused
from configs.secrets import one_line
from runtimes.process.job import EVENT_FD, Job, write_job
from runtimes.process.launcher import STOPPED, wait_or_kill
from runtimes.registry import interpreter

log = logging.getLogger("kiln")
Event = dict[str, Any]


#: A line of a log that names an error; what follows it may be the frames of a stack.
TELLING = re.compile(
    r"(error|exception)(: |$)|what\(\):|check failed: |\[(error|critical)\] ", re.IGNORECASE
)
#: Lines of a log that an error quotes, and that are looked through for them.
QUOTED = 3
KEPT = 200
LONGEST = 1000  # characters of a reason
#: Seconds for a connected process to end by itself.
END_SECONDS = 10.0
#: Set while a job writes its last checkpoint; another SIGTERM to this process would kill the job.
stopping = threading.Event()


class JobStopped(Away):
    """The process ended by a signal to stop, after a checkpoint: another try resumes."""


class JobFailed(Failed):
    """The process failed; the message has its reason, or the lines of its log with the reason."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def run_job(
    job: Job, on_event: Callable[[Event], None] = lambda event: None, *, grace_seconds: float = 60.0
) -> Event:
    """Run `python -P -m runtimes JOB.json` and return the fields of its `result` event.

    The process and its children have a session of their own, so terminal signals do not reach them.
    On an interruption (Ctrl-C, a cancelled Prefect run) the process alone receives SIGTERM. After
    `grace_seconds`, the time for a checkpoint, it and its children receive SIGKILL. If this process
    is killed, the child's standard input ends, which the child treats as SIGTERM.

    Raises:
        Refused: the job's settings are invalid.
        OSError: the job could not write, for example to a full disk.
        Away: a remote store did not respond, after several attempts.
        JobStopped: another process stopped the job, after a checkpoint.
        LockLost: another builder took over the artifact; the job was killed.
        JobFailed: the job failed for another reason.
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
        output = ChildOutput(on_event)
        with os.fdopen(events_read) as events:
            pumps = (lambda: output.events(events), lambda: output.log(child.stdout))
            stop = partial(_stop, child, grace_seconds)
            return wait_for_result(child, output, pumps, stop, partial(_kill, child))


class ChildOutput:
    """The output of a runtime's process: its events and the last lines of its log."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self.last_events: dict[str, Event] = {}  # by kind
        self.last_lines: deque[str] = deque(maxlen=KEPT)
        self._on_event = on_event

    def events(self, lines: Iterable[str]) -> None:
        """Read lines that are events; an incomplete line of a killed process is ignored."""
        for line in lines:
            try:
                event = json.loads(line)
                event["event"]  # raises for other JSON
            except (ValueError, TypeError, KeyError):
                continue
            self.take(event)

    def log(self, lines: Iterable[str] | None) -> None:
        """Read lines of the log."""
        for line in lines or ():
            self.say(line)

    def take(self, event: Event) -> None:
        """Pass on one event."""
        kind = event["event"]
        self.last_events[kind] = event
        if kind == "warning":
            log.warning("%s", event["message"])
        try:
            self._on_event(event)
        except Exception:  # the pipe must be drained even if the display fails
            log.exception("an event could not be displayed")

    def say(self, line: str) -> None:
        """Keep one line of the log."""
        if text := line.rstrip():
            self.last_lines.append(text)
            log.debug("%s", text)


def wait_for_result(
    child: subprocess.Popen[str],
    output: ChildOutput,
    pumps: Iterable[Callable[[], None]],
    stop: Callable[[], None],
    kill: Callable[[], None],
) -> Event:
    """Wait for a job's process and return its `result` event. Raises as `run_job`.

    Args:
        pumps: functions that each read one stream into `output`, to its end.
        stop: stops the process when the wait is interrupted.
        kill: ends it at once, without a checkpoint: its folder is another builder's.
    """
    threads = [_pump(read) for read in pumps]
    try:
        code = _wait(child)
    except LockLost:
        kill()
        raise
    except BaseException:
        stopping.set()
        try:
            stop()
        finally:
            stopping.clear()
        raise
    finally:
        _signal_group(child, signal.SIGKILL)  # its own children, which may hold the pipes open
        if child.stdin is not None:
            child.stdin.close()
        # Nothing of the group is left, so both pipes end; a slow display only delays the join.
        for thread in threads:
            thread.join()
    if code == 0 and "result" in output.last_events:
        return output.last_events["result"]
    check_held(ask=True)  # the process may have found it first
    raise failure(code, output.last_events.get("error", {}), list(output.last_lines))


def _wait(child: subprocess.Popen[str]) -> int:
    """The exit code. Raises LockLost as soon as another builder has taken over the artifact."""
    while True:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(1.0)
        check_held()


def failure(code: int, error: Event, lines: list[str]) -> Exception:
    """The error of a job by its exit code, its `error` event and the last lines of its log."""
    message = error.get("message")
    if error.get("wrong_input"):
        return Refused(message)
    if error.get("away"):
        why = one_line(OSError(message))
        return Away(f"a remote store cannot be used now ({why}): run again later")
    if (number := error.get("errno")) and error.get("file"):  # such as one of a cache
        return OSError(number, os.strerror(number), error["file"])
    if number:  # for example a full disk, which the stage handles
        return OSError(number, message)
    if code == STOPPED:
        return JobStopped("the runtime's process was stopped; run again to resume")
    ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    reason = message or _telling(lines)
    if code == -signal.SIGKILL and not message:  # the end of its log is about something else
        reason = "probably this machine ran out of memory: free some, and run again"
    reason = f": {one_line(RuntimeError(reason), LONGEST)}" if reason else ""
    return JobFailed(f"the runtime's process {ended}{reason}", code)


def _telling(lines: list[str]) -> str:
    """The lines of a log that end with its last error, or the last lines if it names none."""
    named = (number for number, line in enumerate(lines, 1) if TELLING.search(line))
    end = max(named, default=len(lines))
    return " | ".join(line.strip() for line in lines[max(0, end - QUOTED) : end])


def _pump(read: Callable[[], None]) -> threading.Thread:
    """A reader thread with the caller's context variables, which hold the Prefect run."""
    thread = threading.Thread(target=contextvars.copy_context().run, args=(read,), daemon=True)
    thread.start()
    return thread


def _stop(child: subprocess.Popen[str], grace_seconds: float) -> None:
    log.info("stopping the runtime's process (it has %g s to checkpoint)", grace_seconds)
    # Its children must live on: a compilation never ends once PyTorch's compile process is dead.
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(grace_seconds)
    except BaseException:
        _kill(child)


def _kill(child: subprocess.Popen[str]) -> None:
    _signal_group(child, signal.SIGKILL)
    child.wait()


def _signal_group(child: subprocess.Popen[str], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)


class ProcessLost(Away):
    """The process has ended; the message has the last line of its log."""


class ConnectedProcess:
    """A module in a process of its own, `python -P -m MODULE SOCKET... ARGUMENT...`.

    Its output goes to a temporary log. It must end when its sockets close, which they do when this
    object is closed or collected, or this process ends.

    Args:
        what: the process, for errors.
        arguments: those of the module, after its sockets.
        sockets: their number. One thread may ask at a socket at a time.
        environment: variables that are added to those of this process.
    """

    def __init__(
        self,
        what: str,
        module: str,
        arguments: Sequence[str] = (),
        *,
        python: str = sys.executable,
        sockets: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._what = what
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # closed with us
        self._ending = threading.Lock()
        with ExitStack() as theirs:
            pairs = [socket.socketpair() for _ in range(sockets)]
            numbers = [theirs.enter_context(pair[1]).fileno() for pair in pairs]
            self._child = subprocess.Popen(
                [python, "-P", "-m", module, *map(str, numbers), *arguments],
                env={**os.environ, **(environment or {})},
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the closed sockets end it, not Ctrl-C
            )
        self.pid = self._child.pid
        self._connections = [Connection(ours.detach()) for ours, _ in pairs]
        self._finalizer = weakref.finalize(self, _end, self._connections, self._child)

    def ask(self, request: bytes, number: int = 0) -> bytes:
        """The answer at a socket. Raises ProcessLost."""
        self.send(request, number)
        return self.receive(number)

    def send(self, request: bytes, number: int = 0) -> None:
        """Raises ProcessLost."""
        try:
            self._connections[number].send_bytes(request)
        except OSError:
            raise self._lost() from None

    def receive(self, number: int = 0) -> bytes:
        """Raises ProcessLost."""
        try:
            return self._connections[number].recv_bytes()
        except (EOFError, OSError):
            raise self._lost() from None

    def close(self) -> int:
        """Close the sockets, wait for the process, and return its exit code."""
        self._finalizer()
        return self._child.wait()

    def _lost(self) -> ProcessLost:
        with self._ending:
            code = wait_or_kill(self._child, END_SECONDS)
            self._log.seek(0)
            text = self._log.read().strip()
        log.debug("%s", text)
        last = text.rpartition("\n")[2]
        return ProcessLost(f"{self._what} ended with {code}: {last}")


def _end(connections: Iterable[Connection], child: subprocess.Popen[bytes]) -> None:
    for connection in connections:
        connection.close()
    wait_or_kill(child, END_SECONDS)
