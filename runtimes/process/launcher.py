"""The first rank of a host starts the host's other ranks, reads their events, and ends them.

A process reads its rank from the launcher's environment variables. Supported launchers: ours and
torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), mpirun
(OMPI_COMM_WORLD_*), and MindSpore's msrun (RANK_ID, MS_WORKER_NUM, DEVICE_ID, with
MS_ROLE=MS_WORKER). Under torchrun (RANK is set) ours starts no process.

In a run of several hosts, an agent (host_agent.py) starts one process on each, with NNODES,
NODE_RANK, MASTER_ADDR and MASTER_PORT. Ranks are numbered host by host.

A stop request is SIGTERM, SIGINT (Ctrl-C), or the death of the parent process. A child has a pipe
for its events, and a pipe as standard input that closes when its first rank dies. A byte on it
passes on a signal that requests a stop.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, NoReturn

from configs.errors import Refused
from runtimes.process.job import EVENT_FD

#: Environment variable of the processes that `Launcher` starts; torchrun does not set it.
FOLLOWER = "KILN_FOLLOWER"
#: Environment variable of the processes of a host with an agent, which kills them after a grace.
AGENT = "KILN_HOST_AGENT"
_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}


@dataclass(frozen=True)
class Ranks:
    """Rank and world size of this process."""

    rank: int = 0  # of this process, from 0
    world: int = 1  # processes of the run
    local_rank: int = 0  # of this process, among those of its machine
    local_world: int = 1  # processes of its machine; under msrun, a lower bound

    @classmethod
    def here(cls) -> Ranks:
        """Read the environment; without a launcher, a single process. Raises Refused."""
        if "RANK" not in os.environ and _started_by_msrun():
            local_rank = int(os.environ.get("DEVICE_ID") or 0)
            rank = os.environ.get("RANK_ID")
            if rank is None:  # msrun then assigns ranks only at the rendezvous
                raise Refused("msrun on several hosts: pass --node_rank to each msrun")
            return cls(int(rank), int(os.environ["MS_WORKER_NUM"]), local_rank, local_rank + 1)
        defaults = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
        return cls(*(int(os.environ.get(name) or default) for name, default in defaults))

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which alone emits events and writes all but checkpoints."""
        return self.rank == 0


@dataclass(frozen=True)
class Hosts:
    """Number of hosts of this run, and the number of this one; for our launcher."""

    count: int = 1
    number: int = 0  # of this host, from 0

    @classmethod
    def here(cls) -> Hosts:
        """Read NNODES and NODE_RANK, torchrun's names; without NNODES, a single host.

        Raises:
            Refused: a value is wrong, or the address of the rendezvous is missing.
        """
        count = _number("NNODES", "1")
        if count < 2:
            return cls()
        number = _number("NODE_RANK", "")
        if not 0 <= number < count:
            raise Refused(f"NODE_RANK={number} with NNODES={count}: set 0 to {count - 1}")
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise Refused(f"NNODES={count} needs {name}, of host 0: set it on all hosts")
        _number("MASTER_PORT", "")
        return cls(count, number)


def _number(name: str, default: str) -> int:
    """An environment variable that is a whole number. Raises Refused."""
    text = os.environ.get(name) or default
    if not text.isdecimal():
        raise Refused(f"{name}={text!r} in the environment: set a whole number")
    return int(text)


def launched() -> bool:
    """Whether torchrun, mpirun, msrun or ours has started the processes of this run."""
    return "RANK" in os.environ or _started_by_msrun()


def is_msrun_scheduler() -> bool:
    """Whether msrun started this process as its rendezvous server, which does not train."""
    return os.environ.get("MS_ROLE") == "MS_SCHED"


def adopt_mpi() -> None:
    """Set torchrun's environment variables from mpirun's (also gaudi_spawn's), if there are several
    processes.

    Raises:
        Refused: the processes run on several hosts and MASTER_ADDR is not set.
    """
    variables = {name: os.environ[theirs] for name, theirs in _MPI.items() if theirs in os.environ}
    if int(variables.get("WORLD_SIZE", 1)) == 1:
        return
    alone = variables["WORLD_SIZE"] == variables.get("LOCAL_WORLD_SIZE")  # one host
    if "MASTER_ADDR" not in os.environ and not alone:
        raise Refused("mpirun on several hosts: add `-x MASTER_ADDR=HOST` to its command line")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "12345")
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def _started_by_msrun() -> bool:
    return os.environ.get("MS_ROLE") == "MS_WORKER"


def is_follower() -> bool:
    """Whether a launcher started this process, which must end when its host's first rank does."""
    return FOLLOWER in os.environ


def _has_agent() -> bool:
    """Whether a host's agent has started this process or its launcher."""
    return AGENT in os.environ


#: Signals that request a stop.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: Exit code after a stop request: 128 + SIGTERM.
STOPPED = 143


class Stop:
    """A stop request. The first signal requests a stop; the second kills the process.

    The parent's death, or its byte on our standard input, requests a stop and never kills. Before
    `defer` there is no progress to save, so the first signal ends the process at once. With a
    host's agent a second signal changes nothing: Slurm signals the ranks beside the agent.

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
        if self._signalled and _has_agent():
            return
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
    # The first rank has died: the run cannot go on. Or the agent has, which asks before it ends: no
    # other process would kill this one, if it waits for a lost host in a collective.
    if is_follower() or _has_agent():
        os._exit(STOPPED)
    if not stop.requested:  # otherwise the parent's death after its SIGTERM would kill
        os.kill(os.getpid(), signal.SIGTERM)


#: Fields of an event `error` with which the first rank reports it again.
FACTS = ("wrong_input", "errno", "file", "away", "traceback")
#: Time limit in seconds for the first rank to fail by itself after the loss of a child.
NOTICE_SECONDS = 10.0
#: Seconds until all ranks that fail as a consequence of a loss have reported their errors.
WAKE_SECONDS = 1.0
#: Time limit in seconds for the children to exit after the first rank has finished.
END_SECONDS = 60.0


class LostRank(RuntimeError):
    """Another process of the run failed or was killed; the message states its rank and cause."""

    def __init__(self, rank: int, code: int, error: dict[str, Any]) -> None:
        self.code = 1 if code < 0 else code
        self.failed_at = float(error.get("time") or 0.0)  # 0 if a signal killed it: the first cause
        self.facts = {name: error[name] for name in FACTS if name in error}
        self.facts["time"] = self.failed_at  # by which the cause on several hosts is found
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        super().__init__(error.get("message") or f"process {rank} of the run (from 0) {ended}")


@dataclass
class _Child:
    """A child process and the content of its events."""

    rank: int
    process: subprocess.Popen[bytes]
    events: IO[str]
    finished: bool = False  # it reported its result: a later exit is no loss
    error: dict[str, Any] | None = None

    def ask_to_stop(self) -> None:
        """Request a stop without a signal: a second signal would kill the process."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended
            os.write(self.process.stdin.fileno(), b"\n")


class Launcher:
    """Context manager that runs the other ranks of this host as child processes.

    It sets the environment variables that `Ranks.here` reads.

    Args:
        job: path of the job file.
        count: number of processes of this host, this one included; 1 starts no child.
        on_loss: called in a thread if a child is lost while this process waits in a collective,
            where it cannot fail by itself. It must end this process.
        hosts: the hosts of the run, each with `count` processes.
    """

    def __init__(
        self, job: Path, count: int, on_loss: Callable[[LostRank], None], hosts: Hosts = Hosts()
    ) -> None:
        self._job = job
        self._count = count
        self._hosts = hosts
        self._on_loss = on_loss
        self._children: list[_Child] = []
        self._lost: list[LostRank] = []
        self._loss = threading.Event()
        self._shutting_down = threading.Event()
        self._port = socket.socket()  # of the rendezvous

    def __enter__(self) -> None:
        if self._hosts.count == 1 and self._count > 1:
            port = _reserve_port(self._port)
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if self._hosts.count * self._count > 1:
            os.environ |= _ranks_environment(self._hosts, self._count)
        if self._count == 1:
            return
        self._children = [_start(self._job, local_rank) for local_rank in range(1, self._count)]
        for child in self._children:
            threading.Thread(target=self._follow_events, args=(child,), daemon=True).start()
        threading.Thread(target=self._watch, name="launcher", daemon=True).start()
        self._pass_on_signals()

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Wait for the children; after an error, kill them.

        Raises:
            LostRank: a child was lost first, and the error here is a consequence.
        """
        self._port.close()
        # A lost connection raises here before the lost child's exit is known: wait for that.
        suspect = isinstance(error, RuntimeError) and bool(self._children)
        lost = self._root_cause(NOTICE_SECONDS) if suspect else None
        self._shutting_down.set()
        if self._children:
            os.close(signal.set_wakeup_fd(-1))  # this ends the thread that reads it
        self._end(END_SECONDS if error is None else 0.0)
        if lost is not None:
            raise lost from None

    def _follow_events(self, child: _Child) -> None:
        for line in child.events:
            try:
                event = json.loads(line)
            except ValueError:  # a killed child may leave an incomplete line
                continue
            child.finished |= event["event"] == "result"
            if event["event"] == "error":
                child.error = event
        code = child.process.wait()
        if not child.finished and not self._shutting_down.is_set():
            self._lost.append(LostRank(child.rank, code, child.error or {}))
            self._loss.set()

    def _pass_on_signals(self) -> None:
        """Tell the children of a stop signal, even while this process waits in a collective.

        Python's own handler runs after the collective, which may wait for a child's slow read.
        """
        read, write = os.pipe()
        os.set_blocking(write, False)  # signal.set_wakeup_fd requires it
        signal.set_wakeup_fd(write)
        threading.Thread(target=self._tell_of_stop, args=(read,), daemon=True).start()

    def _tell_of_stop(self, signals: int) -> None:
        with os.fdopen(signals, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] in STOP_SIGNALS:
                    for child in self._children:
                        child.ask_to_stop()

    def _watch(self) -> None:
        self._loss.wait()
        if not self._shutting_down.wait(NOTICE_SECONDS) and (lost := self._root_cause(0.0)):
            self._shutting_down.set()
            self._end(0.0)
            self._on_loss(lost)

    def _root_cause(self, seconds: float) -> LostRank | None:
        """The root-cause rank: killed without a message, or else with the earliest error.

        None if no child is lost within `seconds`.
        """
        if not self._loss.wait(seconds):
            return None
        time.sleep(WAKE_SECONDS)
        return min(self._lost, key=lambda lost: lost.failed_at)

    def _end(self, seconds: float) -> None:
        """Kill the children that do not exit within `seconds`.

        A run without an error ends after all ranks have written their checkpoint files.
        """
        deadline = time.monotonic() + seconds
        for child in self._children:
            wait_or_kill(child.process, max(0.0, deadline - time.monotonic()))


def wait_or_kill(process: subprocess.Popen[bytes], seconds: float) -> int:
    """The exit code of a process, which is killed after `seconds`."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def count_cores() -> int:
    """Number of CPU cores in this process's affinity mask, or of the machine if unknown."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _reserve_port(holder: socket.socket) -> int:
    """A free port, which is nobody else's until the rendezvous listens on it or `holder` closes.

    Imports take seconds, in which the system would give a free port to any connection of this
    machine. It gives none that is bound; a server with SO_REUSEADDR may still bind it.
    """
    holder.bind(("127.0.0.1", 0))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return int(holder.getsockname()[1])


def _ranks_environment(hosts: Hosts, count: int) -> dict[str, str]:
    """torchrun's environment variables for the first of a host's `count` processes."""
    variables = {
        "RANK": str(hosts.number * count),
        "WORLD_SIZE": str(hosts.count * count),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(count),
    }
    if count > 1:  # they share the cores
        threads = max(1, count_cores() // count)
        variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
    return variables


def _start(job: Path, local_rank: int) -> _Child:
    """Start a process of this host, after the environment variables of its first rank are set."""
    rank = int(os.environ["RANK"]) + local_rank
    events, write = os.pipe()
    variables = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
    process = subprocess.Popen(
        [sys.executable, "-P", "-u", "-m", "runtimes", str(job)],
        env={**os.environ, **variables, EVENT_FD: str(write), FOLLOWER: "1"},
        pass_fds=(write,),
        stdin=subprocess.PIPE,
    )
    os.close(write)
    return _Child(rank, process, os.fdopen(events))


def leave(code: int) -> NoReturn:
    """Run the exit handlers, write what is buffered, and end this process with `code`.

    The interpreter is not shut down: threads of PyTorch's collectives outlive their last result,
    and a thread that then drops a tensor aborts the process.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it, or it is closed
            stream.flush()
    os._exit(code)
