"""Call functions of a driver file in a process of a runtime, which imports its packages once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

MAIN = Path(__file__).with_name("driver_process_main.py")
#: Timeout of a call in seconds; compiling on a busy machine takes minutes.
TIMEOUT = 900.0


class DriverProcess:
    """A process that has imported a driver.

    Args:
        driver: file with the functions.
        python: interpreter of the runtime's environment.
        folder: folder of the process's log.
        variables: additional environment variables.
        fork: run each call in a fork, isolated from other calls; False: run all calls in the
            process, so that they share compiled programs.
    """

    def __init__(
        self,
        driver: Path,
        python: str,
        folder: Path,
        variables: Mapping[str, str] | None = None,
        *,
        fork: bool = True,
    ) -> None:
        self._name, self._log = driver.name, folder / f"{driver.stem}.log"
        calls_read, calls_write = os.pipe()
        answers_read, answers_write = os.pipe()
        words = ["fork" if fork else "stay", str(driver), str(calls_read), str(answers_write)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, "-P", "-u", str(MAIN), *words],
                env={**os.environ, **(variables or {})},
                pass_fds=(calls_read, answers_write),
                stdin=subprocess.PIPE,  # a job ends when its standard input closes
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(calls_read)
        os.close(answers_write)
        self._calls = os.fdopen(calls_write, "w", buffering=1)
        self._answers = os.fdopen(answers_read)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function; arguments and result are JSON.

        Raises AssertionError with the traceback if the function raises, with the end of the log
        if the process is killed.
        """
        answer: dict[str, Any] = {}
        deadline = threading.Timer(TIMEOUT, self._kill)
        deadline.start()
        try:
            self._calls.write(json.dumps([name, arguments]) + "\n")
            for line in self._answers:
                answer |= json.loads(line)
                if "ended" in answer:  # the fork has ended
                    break
        except BrokenPipeError:
            pass  # the log has the reason
        finally:
            deadline.cancel()
        assert "found" in answer, f"{name} of {self._name}: {answer.get('failed', self.log_end())}"
        return answer["found"]

    def log_end(self) -> str:
        """The end of the process's log."""
        return self._log.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        """Kill the process."""
        self._kill()
        assert self._process.stdin is not None
        for pipe in (self._process.stdin, self._calls, self._answers):
            with suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
