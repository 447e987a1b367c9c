"""Call functions of a driver in a process of a runtime, which imports its packages once.

Each call runs in a fork of that process, so that none finds what another has left there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("inside_process.py")
#: Seconds after which a call is taken to hang: compiling on a busy machine takes minutes.
PATIENCE = 900.0


class Inside:
    """A process that has imported a driver.

    Args:
        driver: the file whose functions are called.
        python: interpreter of the runtime's environment.
        folder: for the process's log.
        variables: what its environment has besides ours.
    """

    def __init__(
        self, driver: Path, python: str, folder: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self._name, self._log = driver.name, folder / f"{driver.stem}.log"
        read, write = os.pipe()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, "-P", "-u", str(PROGRAM), str(driver), str(write)],
                env={**os.environ, **(variables or {})},
                pass_fds=(write,),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        os.close(write)
        self._answers = os.fdopen(read)

    def call(self, name: str, *arguments: Any) -> Any:
        """What a function gives for arguments, all as JSON.

        Raises AssertionError, with its traceback, if it raises.
        """
        assert self._process.stdin is not None
        answer: dict[str, Any] = {}
        deadline = threading.Timer(PATIENCE, self._kill)
        deadline.start()
        try:
            self._process.stdin.write(json.dumps([name, arguments]) + "\n")
            self._process.stdin.flush()
            for line in self._answers:
                answer |= json.loads(line)
                if "ended" in answer:  # and with it the fork
                    break
        except BrokenPipeError:
            pass  # the log says why
        finally:
            deadline.cancel()
        log = self._log.read_text(errors="replace")[-3000:]
        assert "found" in answer, f"{name} of {self._name}: {answer.get('failed', log)}"
        return answer["found"]

    def close(self) -> None:
        """End the process, which has nothing to save."""
        self._kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._answers.close()

    def _kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
