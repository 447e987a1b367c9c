"""Run a job on several machines: the one retry logic of all engines.

An attempt ends with the job's result, with an error of the job itself, or because machines were
lost or taken away. In the last case the next attempt resumes from the newest checkpoint, or makes
what is missing, on the machines that the engine then reserves.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from fsspec.core import url_to_fs

from artifacts.lock import LockLost, check_held
from artifacts.models import digest_model, files_below, put_model
from artifacts.store import Store
from configs.errors import Away
from configs.settings.clusters import Cluster
from runtimes.process.job import TrainJob
from runtimes.process.launcher import STOPPED
from tasks.child_process import ChildOutput, Event, JobFailed, failure, stopping
from tasks.hosts.engine import AFTER_GRACE, Agents, Engine

log = logging.getLogger("kiln")
READ_SECONDS = 1.0
KEPT = 200  # lines that no agent wrote, for an error
#: Seconds without a sign of life after which a host is lost, once another host has failed.
SILENCE_AFTER_FAILURE = 5.0
#: Seconds for the first line of a host: its interpreter may start from a slow disk or a new image.
START_SECONDS = 900.0
#: Seconds for the other hosts to end after the result.
END_SECONDS = 60.0
#: Exit codes of an agent whose ranks were killed or stopped: -SIGTERM too, before its handlers.
TAKEN_AWAY = (STOPPED, -15)


@dataclass(frozen=True)
class HostsJob:
    """A job of several hosts, and what its attempts keep.

    Attributes:
        work: URL of a folder for the job's file, which all hosts can read.
        content: what the file has; `kind` names the module that an agent starts.
        together: whether no host goes on without the others, as in a training.
        any_ends: whether all is done once one host has ended well: it has waited for the others.
        kept: one of what an attempt keeps, for messages.
        count: how many are kept; None: the events `checkpoint` tell.
    """

    work: str
    content: dict[str, Any]
    together: bool = True
    any_ends: bool = False
    kept: str = "checkpoint"
    count: Callable[[], int] | None = None


def run_on_hosts(
    engine: Engine,
    job: TrainJob,
    on_event: Callable[[Event], None],
    *,
    agents: Agents,
    store: Store,
    cluster: Cluster,
) -> Event:
    """Run a train job on several machines, as `tasks.child_process.run_job` does on this one.

    Args:
        agents: their `job` is set here.
        store: a store that all hosts can read and write.

    Raises: as `run_hosts_job`.
    """
    vae = None if job.vae is None else in_store(store, job.vae)
    job = replace(job, model=in_store(store, job.model), vae=vae)
    return run_hosts_job(
        engine, HostsJob(job.work, asdict(job)), on_event, agents=agents, cluster=cluster
    )


def run_hosts_job(
    engine: Engine,
    job: HostsJob,
    on_event: Callable[[Event], None],
    *,
    agents: Agents,
    cluster: Cluster,
) -> Event:
    """Run a job on several machines, and return the first host's `result` event.

    Raises:
        Away: the cluster does not answer, or machines were lost too often.
        Refused, OSError, JobFailed, LockLost: as `tasks.child_process.run_job`.
    """
    try:
        return _run_with_restarts(engine, job, on_event, agents, cluster)
    finally:
        try:
            engine.end()
        except Away as error:  # it must hide neither a result nor another error
            log.warning("%s: its machines may remain reserved: %s", engine.name, error)


def in_store(store: Store, folder: str) -> str:
    """URL of a model's folder in the store, where all hosts can read it; copied if missing."""
    root = Path(folder)
    files = {str(path.relative_to(root)): path for path in files_below(root)}
    return put_model(store, digest_model(root), files)


def _run_with_restarts(
    engine: Engine,
    job: HostsJob,
    on_event: Callable[[Event], None],
    agents: Agents,
    cluster: Cluster,
) -> Event:
    left = cluster.restarts
    reached = -1 if job.count is None else job.count()  # step of the newest checkpoint, or a count
    while True:
        check_held(ask=True)  # a successor may use the machines
        attempt = None
        if engine.reserve():
            attempt = _Attempt(engine, job, agents.hosts, cluster.silence_seconds, on_event)
            if (result := attempt.run(agents)) is not None:
                return result
            why = attempt.why_lost
        else:
            why = "the machines were taken away before use"
        check_held(ask=True)
        kept = reached if attempt is None else attempt.reached
        if kept > reached:
            reached = kept
            left = cluster.restarts
        elif left == 0:
            raise Away(
                f"{engine.name}: {why}, in {cluster.restarts + 1} attempts without a new "
                f"{job.kept}: raise {engine.name}.restarts, or run again later"
            )
        else:
            left -= 1
        goes_on = "the next attempt makes what is missing"
        if job.count is None:
            goes_on = "training goes on from its last checkpoint"
        log.warning("%s: %s; %s", engine.name, why, goes_on)


@dataclass
class _Host:
    """What one host's agent has told."""

    output: ChildOutput
    heard: float = 0.0  # time.monotonic() of its last line, or of the start
    name: str = ""
    code: int | None = None  # exit code of its ranks; None: they run, or it was lost
    spoke: bool = False

    @property
    def failed(self) -> bool:
        return self.code not in (None, 0)


@dataclass
class _Attempt:
    """One attempt of a job, on the machines that the engine has reserved."""

    engine: Engine
    job: HostsJob
    count: int
    silence: float
    on_event: Callable[[Event], None]
    why_lost: str = ""
    checkpoint: int = -1  # step of the newest one of this attempt
    _hosts: list[_Host] = field(default_factory=list)
    _grace: float = 0.0  # seconds for a checkpoint
    _read_at: float = 0.0  # time.monotonic() at which the last read began
    _done_at: float | None = None  # time.monotonic() of the result
    _failed_at: float | None = None  # time.monotonic() of the first failure of a host
    _failed_first: int = 0  # number of that host
    _lost: list[int] = field(default_factory=list)  # hosts that fell silent
    _not_started: Away | None = None  # why no agent was started
    _noise: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT))  # lines of no agent

    @property
    def reached(self) -> int:
        """Step of this attempt's newest checkpoint, or how much is kept."""
        return self.checkpoint if self.job.count is None else self.job.count()

    def run(self, agents: Agents) -> Event | None:
        """The `result` event; None if machines were lost, as `why_lost` says. Raises as the job."""
        url = f"{self.job.work}/jobs/{uuid4().hex[:8]}.json"
        fs, path = url_to_fs(url)
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        fs.pipe_file(path, json.dumps(self.job.content, indent=1).encode())
        try:
            self._follow(replace(agents, job=url))
        except LockLost:
            self.engine.kill()
            raise
        except BaseException:
            self._stop(agents.grace)
            raise
        finally:
            with suppress(OSError):  # it must not hide an error
                fs.rm_file(path)
        result = self._result()
        if result is None:
            self._explain()
        elif self._running():
            self._kill_if_it_answers()  # what is left of lost hosts, too
        return result

    def _follow(self, agents: Agents) -> None:
        """Read what the agents say, until all have ended or the attempt has failed."""
        self._grace = agents.grace
        self._hosts = [_Host(ChildOutput(self._on_event)) for _ in range(self.count)]
        try:
            self.engine.start(agents)
        except Away as error:  # a command may fail because the machines were taken away meanwhile
            self._not_started = error
            return
        for host in self._hosts:
            host.heard = time.monotonic()  # the start may have waited for hours in a queue
        while True:
            self._read_at = time.monotonic()
            if (lines := self.engine.read(READ_SECONDS)) is None:
                break
            for line in lines:
                self._hear(line)
            check_held()
            if not self._running() or self._must_end():
                break
        self._lost = self._running() if lines is None else self._silent()

    def _hear(self, line: str) -> None:
        try:
            event = json.loads(line)
            number = event.pop("host")
            host = self._hosts[number]
            kind = event["event"]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            log.debug("%s: %s", self.engine.name, line.rstrip())
            self._noise.append(line.rstrip())
            return
        host.heard = time.monotonic()
        host.spoke = True
        if kind == "host":
            host.name = event["name"]
            if all(host.spoke for host in self._hosts):
                names = self._names(list(range(self.count)))
                log.info("%s: started on host %s", self.engine.name, names)
        elif kind == "line":
            host.output.say(event["text"])
        elif kind == "exit":
            self._end(number, event["code"])
        elif kind != "alive":
            host.output.take(event)

    def _end(self, number: int, code: int) -> None:
        host = self._hosts[number]
        host.code = code
        if host.failed and self._failed_at is None:
            self._failed_first = number
            if self.job.together or code not in TAKEN_AWAY:  # else the others go on
                self._failed_at = host.heard
        if self._result() is not None and self._done_at is None:
            self._done_at = host.heard

    def _on_event(self, event: Event) -> None:
        if event["event"] == "checkpoint":
            self.checkpoint = max(self.checkpoint, event["step"])
        self.on_event(event)

    def _running(self) -> list[int]:
        """Numbers of the hosts that have not said that they ended."""
        return [number for number, host in enumerate(self._hosts) if host.code is None]

    def _must_end(self) -> bool:
        """Whether the attempt has failed, and what the other hosts still say was waited for."""
        silent = self._silent()
        if silent and (self.job.together or silent == self._running()):
            return True
        now = self._read_at
        patience = 2 * SILENCE_AFTER_FAILURE if self.job.any_ends else END_SECONDS
        if self._done_at is not None and now > self._done_at + patience:
            return True
        if self._failed_at is None:
            return False
        # Ranks that lost a peer may wait in a collective for ever; a stop needs all of them, and
        # the first one may write its checkpoint after the others have ended.
        stopped = all(host.code in (None, *TAKEN_AWAY) for host in self._hosts)
        patience = max(self.silence, self._grace) if stopped else 2 * SILENCE_AFTER_FAILURE
        return now > self._failed_at + patience

    def _silent(self) -> list[int]:
        """Numbers of the hosts that have not ended and from which the last read had nothing.

        An event may take long to display, and lines wait meanwhile.
        """
        now = self._read_at
        hosts = self._hosts
        return [n for n in self._running() if now > hosts[n].heard + self._limit(hosts[n])]

    def _limit(self, host: _Host) -> float:
        if self._failed_at is None:
            return self.silence if host.spoke else START_SECONDS
        return SILENCE_AFTER_FAILURE if host.spoke else self.silence  # it may start slowly

    def _result(self) -> Event | None:
        codes = [host.code for host in self._hosts]
        if self.job.any_ends:
            return {"event": "result"} if 0 in codes else None
        ended = codes[0] == 0 if self.job.together else set(codes) == {0}
        return self._hosts[0].output.last_events.get("result") if ended else None

    def _explain(self) -> None:
        """Say in `why_lost` which machines were lost; raise the error of the job itself."""
        try:
            check_held(ask=True)  # a successor may train on the machines, or have given them back
            gone = self.engine.lost()
        finally:
            self.engine.kill()
        if gone is not None:
            self.why_lost = gone
            return
        if self._not_started is not None:
            raise self._not_started
        failed = [number for number, host in enumerate(self._hosts) if host.failed]
        stopped = [number for number in failed if self._hosts[number].code in TAKEN_AWAY]
        if len(self._lost) == self.count and not any(host.spoke for host in self._hosts):
            raise failure(1, {}, [line for line in self._noise if line])
        if self._lost:
            self.why_lost = f"nothing is heard of host {self._names(self._lost)}"
        elif self._failed_first in stopped:  # Kubernetes stops the others after an error of one
            self.why_lost = f"host {self._names(stopped)} was stopped"
        else:
            raise self._failure([number for number in failed if number not in stopped])

    def _failure(self, failed: list[int]) -> Exception:
        """The error of the host that failed first, by its own clock; its ranks' lines are told."""
        number = min(failed, key=lambda number: self._error(number).get("time", 0.0), default=0)
        host = self._hosts[number]
        code = 1 if host.code is None else host.code
        error = failure(code, self._error(number), list(host.output.last_lines))
        if isinstance(error, JobFailed) and self.count > 1:
            return JobFailed(f"host {self._names([number])}: {error}", error.code)
        return error

    def _error(self, number: int) -> Event:
        return self._hosts[number].output.last_events.get("error", {})

    def _names(self, numbers: list[int]) -> str:
        names = (self._hosts[number].name for number in numbers)
        return ", ".join(
            f"{number} ({name})" if name else f"{number}"
            for number, name in zip(numbers, names, strict=True)
        )

    def _stop(self, grace: float) -> None:
        """Stop all ranks with a checkpoint; kill those that do not end.

        A cluster that does not answer must not hide why the ranks are stopped.
        """
        log.info("%s: stopping (it has %g s to checkpoint)", self.engine.name, grace)
        stopping.set()
        try:
            if not any(host.spoke for host in self._hosts):
                return  # nothing runs that could write a checkpoint
            self.engine.stop()
            end = time.monotonic() + grace + AFTER_GRACE
            while time.monotonic() < end and self._running():
                if (lines := self.engine.read(READ_SECONDS)) is None:
                    break
                for line in lines:
                    self._hear(line)
        except Away as error:
            log.warning("%s: %s", self.engine.name, error)
        finally:
            stopping.clear()
            self._kill_if_it_answers()

    def _kill_if_it_answers(self) -> None:
        try:
            self.engine.kill()
        except Away as error:
            log.warning("%s: its ranks may run on: %s", self.engine.name, error)
