"""The agent of one host in a run of several: it starts the host's ranks, and reports each second.

    python -P -u -m runtimes.process.host_agent JOB --hosts N --host K [--address HOST:PORT]

It starts `python -P -m runtimes`, or another module of MODULES, once, in a session of its own;
launcher.py starts the host's other ranks. Its standard output has JSON lines, each with the host's
number K, for the stage that waits:

| event   | fields                                                                              |
|---------|-------------------------------------------------------------------------------------|
| host    | name (of the machine), pid (of this agent); the first line                          |
| alive   | time (s); each second, until this machine freezes                                   |
| line    | text: a line of the ranks' output                                                   |
| others  | as in job.py; of hosts above 0, `error` and `warning` alone                         |
| exit    | code (negative: the signal that killed it); the last line                           |

SIGTERM, SIGINT, a closed standard output, or with `--watch-stdin` the end of standard input request
a stop: the ranks save a checkpoint and exit with 143. Those that wait for a lost host in a
collective never do, so the session is killed after the grace. The exit code is the process's, or
128 + its signal.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from runtimes.process import tpu_host
from runtimes.process.job import EVENT_FD
from runtimes.process.launcher import AGENT, STOP_SIGNALS, STOPPED

#: Seconds between two lines `alive`.
ALIVE_SECONDS = 1.0
#: Seconds between two looks at the process and at the requests to stop it.
POLL_SECONDS = 0.2
#: Variables by which another launcher tells a process its rank: the agent's launcher sets them.
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
#: Kind of a job -> the module that an agent starts.
MODULES = {"train": "runtimes", "generate": "runtimes", "shards": "tasks.devices.host_shards"}


def main(arguments: list[str]) -> int:
    """Run the command line `arguments` (without the program's name) and return the exit code."""
    options = _parse(arguments)
    agent = HostAgent(options.host, options.grace)
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: agent.stop())
    if options.watch_stdin:
        _in_thread(lambda: agent.stop_at_end_of(sys.stdin.buffer))
    with tempfile.TemporaryDirectory(prefix="kiln-host-") as folder:
        try:
            job = _local(options.job, Path(folder))
        except Exception as error:  # clients of remote stores define their own exception types
            agent.fail(f"the job {options.job} cannot be read: {error}", away=True)
            return 1
        if not job.is_file():
            where = f"{options.job} is not on {socket.gethostname()}"
            agent.fail(f"{where}: set store to a URL, or a disk of all hosts", wrong_input=True)
            return 1
        kind = _kind(job)
        # The hosts of a training are one slice; those of another job compute apart.
        chips = {} if kind == "train" else tpu_host.alone()
        return agent.run(_command(kind, job), _environment(options) | chips)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("host_agent")
    parser.add_argument("job", help="path or URL of the job's file")
    parser.add_argument("--hosts", type=int, required=True, help="number of hosts of the run")
    parser.add_argument("--host", type=int, required=True, help="number of this host, from 0")
    parser.add_argument("--address", help="HOST:PORT of host 0; default: MASTER_ADDR, MASTER_PORT")
    parser.add_argument("--grace", type=float, default=60.0, help="seconds for a last checkpoint")
    parser.add_argument(
        "--watch-stdin", action="store_true", help="stop when the standard input ends"
    )
    options = parser.parse_args(arguments)
    if not 0 <= options.host < options.hosts:
        parser.error(f"--host {options.host} of --hosts {options.hosts}: it counts from 0")
    host, _, port = (options.address or "host:0").rpartition(":")
    if not host or not port.isdecimal():
        parser.error(f"--address {options.address}: pass HOST:PORT, of host 0")
    return options


def _kind(job: Path) -> str:
    """The kind of a job's file, one of MODULES."""
    return str(json.loads(job.read_bytes()).get("kind", "train"))


def _command(kind: str, job: Path) -> list[str]:
    """The command of the host's first rank."""
    return [sys.executable, "-P", "-u", "-m", MODULES[kind], str(job)]


def _local(job: str, folder: Path) -> Path:
    """The path of a job's file, which is copied to `folder` if it is in a bucket."""
    if "://" not in job:
        return Path(job)
    from fsspec.core import url_to_fs

    fs, path = url_to_fs(job)
    fs.get_file(path, str(folder / "job.json"))
    return folder / "job.json"


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """The variables of the ranks, with torchrun's names."""
    variables = {name: value for name, value in os.environ.items() if name not in PLACE}
    variables |= {"NNODES": str(options.hosts), "NODE_RANK": str(options.host)}
    if options.address is not None:
        host, _, port = options.address.rpartition(":")
        variables |= {"MASTER_ADDR": host.strip("[]"), "MASTER_PORT": port}
    return variables


class HostAgent:
    """Runs a host's ranks and writes the lines.

    Args:
        host: number of this host.
        grace: seconds from a stop request until the session is killed.
    """

    def __init__(self, host: int, grace: float) -> None:
        self._host = host
        self._grace = grace
        self._writing = threading.Lock()
        self._stopping = False
        self._say("host", name=socket.gethostname(), pid=os.getpid())
        _in_thread(self._beat)

    def stop(self) -> None:
        """Request a stop. Further requests change nothing: a second signal would kill the ranks."""
        self._stopping = True

    def stop_at_end_of(self, stream: IO[bytes]) -> None:
        """Request a stop once a stream has ended."""
        while stream.read(4096):
            pass
        self.stop()

    def fail(self, message: str, **facts: bool) -> None:
        """Report that the ranks cannot be started; `facts` are those of an event `error`."""
        self._say("error", message=message, **facts)
        self._say("exit", code=1)

    def run(self, command: list[str], environment: dict[str, str]) -> int:
        """Start the ranks, wait until they have ended, and return the exit code."""
        events, write = os.pipe()
        child = subprocess.Popen(
            command,
            env={**environment, EVENT_FD: str(write), AGENT: "1"},
            pass_fds=(write,),
            start_new_session=True,
            stdin=subprocess.PIPE,  # it closes when this agent dies
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        os.close(write)
        pumps = [
            _in_thread(lambda: self._pass_on_events(os.fdopen(events, errors="replace"))),
            _in_thread(lambda: self._pass_on_lines(child.stdout or ())),
        ]
        code = self._wait(child)
        _kill_session(child)  # its own children, which may hold the pipes open
        for pump in pumps:
            pump.join()
        if code == -signal.SIGTERM:  # it was stopped while it imported
            code = STOPPED
        self._say("exit", code=code)
        return code if code >= 0 else 128 - code

    def _wait(self, child: subprocess.Popen[str]) -> int:
        """The exit code. A stop request is passed on once; after the grace, the session dies."""
        deadline: float | None = None
        while True:
            with suppress(subprocess.TimeoutExpired):
                return child.wait(POLL_SECONDS)
            if not self._stopping:
                continue
            if deadline is None:
                deadline = time.monotonic() + self._grace
                child.send_signal(signal.SIGTERM)
            elif time.monotonic() > deadline:
                _kill_session(child)

    def _pass_on_events(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                try:
                    event = json.loads(line)
                    kind = event.pop("event")
                except (ValueError, TypeError, KeyError, AttributeError):
                    continue  # a killed process may leave an incomplete line
                if self._host == 0 or kind in ("error", "warning"):
                    self._say(kind, **event)

    def _pass_on_lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._say("line", text=line.rstrip("\n"))

    def _beat(self) -> None:
        while True:
            self._say("alive", time=round(time.time(), 3))
            time.sleep(ALIVE_SECONDS)

    def _say(self, event: str, **fields: Any) -> None:
        line = json.dumps({"host": self._host, "event": event, **fields})
        with self._writing:
            try:
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
            except (BrokenPipeError, ValueError):  # nobody waits for the run any more
                self.stop()


def _in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _kill_session(child: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(code)  # a thread may wait in a read of standard input
