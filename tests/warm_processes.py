"""Start Python modules as forks of one interpreter that has imported PyTorch already.

Each job of a flow imports PyTorch, diffusers and transformers for six seconds of processor time. A
fork has a process id, a session, pipes and an exit code of its own, too. Runs of `kiln` by command
start real processes.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pytest

MAIN = Path(__file__).with_name("warm_process_main.py")
#: Prefixes of variables that packages read when they are imported.
READ_AT_IMPORT = (
    "CUDA",
    "HF_",
    "HUGGINGFACE",
    "JAX",
    "MKL",
    "OMP",
    "PT_",
    "PYTHON",
    "TORCH",
    "XLA",
)


class WarmProcess:
    """A module's process, forked from a warm interpreter, as subprocess.Popen has it."""

    def __init__(
        self,
        requests: socket.socket,
        module: str,
        words: Sequence[str],
        variables: Mapping[str, str],
        *,
        pass_fds: Sequence[int],
        streams: Sequence[Any],
        new_session: bool,
    ) -> None:
        theirs, ours = [], []
        for number, stream in enumerate(streams):
            mine: int | None = None
            if stream is subprocess.PIPE:
                read, write = os.pipe()
                end, mine = (read, write) if number == 0 else (write, read)
            elif stream is subprocess.STDOUT:
                end = os.dup(theirs[1])
            elif stream is subprocess.DEVNULL:
                end = os.open(os.devnull, os.O_RDWR)
            else:
                end = os.dup(number if stream is None else stream.fileno())
            theirs.append(end)
            ours.append(mine)
        told, tell = os.pipe()
        given = {
            "module": module,
            "words": list(words),
            "variables": dict(variables),
            "folder": os.getcwd(),
            "numbers": [0, 1, 2, *pass_fds],
            "new_session": new_session,
        }
        descriptors = [*theirs, *pass_fds, tell]
        socket.send_fds(requests, [json.dumps(given).encode()], descriptors)
        for number in (*theirs, tell):
            os.close(number)
        self.args = ["-m", module, *words]
        self.stdin: IO[str] | None = None if ours[0] is None else os.fdopen(ours[0], "w")
        self.stdout: IO[str] | None = (
            None if ours[1] is None else os.fdopen(ours[1], errors="replace")
        )
        self.returncode: int | None = None
        self._told = os.fdopen(told, "rb", buffering=0)
        self.pid = int(self._answer()["pid"])

    def poll(self) -> int | None:
        """The exit code, if the process has ended."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._answer()["code"])
            self._told.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send the process a signal."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended since
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)

    def _answer(self) -> dict[str, Any]:
        line = self._told.readline()
        assert line, "the warm interpreter has ended"
        found: dict[str, Any] = json.loads(line)
        return found


class WarmInterpreter:
    """An interpreter that has imported PyTorch, diffusers and transformers.

    Args:
        log: file of its own output.
    """

    def __init__(self, log: Path) -> None:
        self._log, self._variables = log, dict(os.environ)
        self._starting = threading.Lock()  # flows start processes from several threads
        self._requests: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def popen(self, command: Sequence[str], **given: Any) -> Any:
        """As subprocess.Popen; `python … -m MODULE …` of this environment is a fork.

        Variables that packages read at their import, and differ from ours, lead to a real process.
        """
        variables = given.get("env") or dict(os.environ)
        if command[0] != sys.executable or "-m" not in command or self._differs(variables):
            return subprocess.Popen(command, **given)
        module, *words = command[command.index("-m") + 1 :]
        return WarmProcess(
            self._start(),
            module,
            words,
            variables,
            pass_fds=tuple(given.get("pass_fds", ())),
            streams=[given.get(name) for name in ("stdin", "stdout", "stderr")],
            new_session=given.get("start_new_session", False),
        )

    def close(self) -> None:
        """End it; processes that run go on."""
        if self._requests is not None and self._process is not None:
            self._requests.close()
            self._process.wait()

    def _differs(self, variables: Mapping[str, str]) -> bool:
        def read(given: Mapping[str, str]) -> dict[str, str]:
            return {name: text for name, text in given.items() if name.startswith(READ_AT_IMPORT)}

        return read(variables) != read(self._variables)

    def _start(self) -> socket.socket:
        with self._starting:
            if self._requests is None:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs, self._log.open("wb") as log:
                    self._process = subprocess.Popen(
                        [sys.executable, "-P", "-u", str(MAIN), str(theirs.fileno())],
                        env=self._variables,
                        pass_fds=(theirs.fileno(),),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                self._requests = ours
            return self._requests


class _Subprocess:
    """The module `subprocess` with another Popen."""

    def __init__(self, popen: Any) -> None:
        self.Popen = popen

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


@contextmanager
def forked(interpreter: WarmInterpreter) -> Iterator[None]:
    """Processes of jobs and encoders are forks of the warm interpreter."""
    from tasks import child_process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_process, "subprocess", _Subprocess(interpreter.popen))
        yield
