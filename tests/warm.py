"""One process of a runtime for many jobs: it imports its packages and compiles its programs once.

Tests of `python -m runtimes` itself, of several processes and of wrong input start a process a job.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import chips

from runtimes.events import EVENT_FD
from runtimes.job import Job, write_job
from runtimes.registry import interpreter

PROGRAM = Path(__file__).with_name("warm_process.py")
#: Seconds after which a job is taken to hang: compiling on a busy machine takes minutes.
PATIENCE = 900.0


class Warm:
    """A process of a variant of chips.VARIANTS.

    Args:
        folder: for the process's log and the jobs' files.
    """

    def __init__(self, variant: str, folder: Path) -> None:
        self._folder, self._jobs = folder, 0
        jobs_read, jobs_write = os.pipe()
        events_read, events_write = os.pipe()
        with chips.standing_in(variant), (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    interpreter(chips.VARIANTS[variant].runtime),
                    *("-P", "-u", str(PROGRAM), str(jobs_read)),
                ],
                env={**os.environ, EVENT_FD: str(events_write)},
                pass_fds=(jobs_read, events_write),
                stdin=subprocess.PIPE,  # a job ends when it does
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(jobs_read)
        os.close(events_write)
        self._paths = os.fdopen(jobs_write, "w", buffering=1)
        self._events = os.fdopen(events_read)

    def run(self, job: Job) -> list[dict[str, Any]]:
        """Do a job; its events. Raises AssertionError, with the end of the log, if it fails."""
        self._jobs += 1
        path = self._folder / f"job-{self._jobs}.json"
        write_job(job, path)
        self._paths.write(f"{path}\n")
        events: list[dict[str, Any]] = []
        deadline = threading.Timer(PATIENCE, self._kill)
        deadline.start()
        try:
            for line in self._events:
                event = json.loads(line)
                if event["event"] == "ended":
                    assert event["code"] == 0, self._last_words(events)
                    return events
                events.append(event)
        finally:
            deadline.cancel()
        raise AssertionError(f"the process is gone: {self._last_words(events)}")

    def close(self) -> None:
        """End the process; it has no more jobs."""
        self._paths.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._kill()
        self._process.wait()
        self._events.close()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _last_words(self, events: list[dict[str, Any]]) -> str:
        errors = [event["message"] for event in events if event["event"] == "error"]
        log = (self._folder / "log").read_text(errors="replace")[-3000:]
        return "\n".join([*errors, log])
