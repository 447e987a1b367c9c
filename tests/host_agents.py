"""Agents of several hosts, all on this machine, and the lines that they write."""

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from waiting import wait_until

from runtimes.process.collectives import free_port
from runtimes.process.job import TrainJob, write_job

Line = dict[str, Any]


class Agent:
    """One host's agent; `lines` grows as it writes them."""

    def __init__(self, command: Sequence[str]) -> None:
        self._mark = f"KILN_TEST_HOST={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        self.process = subprocess.Popen(
            command,
            env={**os.environ, name: value},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.lines: list[Line] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def said(self, event: str) -> list[Line]:
        """Its lines of a kind, so far."""
        return [line for line in list(self.lines) if line["event"] == event]

    def wait_for(self, event: str, seconds: float = 120, **fields: Any) -> Line:
        """Its first line of a kind with these fields."""

        def matching() -> list[Line]:
            return [line for line in self.said(event) if fields.items() <= line.items()]

        wait_until(lambda: matching() or self.process.poll() is not None, seconds)
        assert matching(), self.lines
        return matching()[0]

    def end(self, seconds: float = 300) -> int:
        """Its exit code, once it has ended by itself and all its lines are read."""
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code

    def processes(self) -> list[int]:
        """The process ids of the agent and its ranks, also of those whose parent is dead."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is another user's
                if self._mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found

    def rank(self, number: int) -> int:
        """The process id of a rank that a launcher started."""
        mark = f"RANK={number}\0".encode()
        (found,) = [
            pid
            for pid in self.processes()
            if b"\0" + mark in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
        ]
        return found

    def signal_all(self, number: int) -> None:
        """Send a signal to the agent and all its ranks, as if their host froze or lost power."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """Kill what is left of the host."""
        self.signal_all(signal.SIGKILL)
        self.process.wait()


def start_agents(
    job: TrainJob, folder: Path, *more: str, hosts: int = 2, python: str | Path = sys.executable
) -> list[Agent]:
    """An agent for each host of a job, whose rendezvous is on this machine.

    Args:
        more: options of the agents.
        python: interpreter of the job's runtime.
    """
    path = folder / f"{uuid.uuid4().hex}.json"
    write_job(job, path)
    command = [str(python), "-P", "-u", "-m", "runtimes.process.host_agent", str(path)]
    command += ["--hosts", str(hosts), "--address", f"127.0.0.1:{free_port()}", *more]
    return [Agent([*command, "--host", str(host)]) for host in range(hosts)]
