"""Engine `slurm`: each attempt is a job of sbatch, whose srun starts one agent a host.

Slurm's own requeue is off: `tasks.hosts.attempts` alone repeats. The flow reads the agents' lines
from the job's output on a shared disk. A job outlives a killed flow, and the next one removes it.
"""

from __future__ import annotations

import logging
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from artifacts.lock import check_held
from configs.errors import Away, Refused
from configs.settings.clusters import Slurm
from tasks.child_process import JobStopped
from tasks.hosts.commands import message_of, run_command
from tasks.hosts.engine import Agents, passed_environment

log = logging.getLogger("kiln")
COMMAND_SECONDS = 60.0  # timeout of a command
STATE_SECONDS = 5.0  # interval of the queries of the state
PENDING_SECONDS = 1.0  # interval of the queries of a waiting job
LINE_SECONDS = 0.2  # interval at which the output is read
END_SECONDS = 10.0  # for which the end of a cancelled job is waited for
#: Job states that lead to RUNNING.
PENDING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESIZING"})
#: Job states in which agents may run.
LIVE = frozenset({"RUNNING", "COMPLETING", "STOPPED", "SUSPENDED", "SIGNALING", "STAGE_OUT"})
#: Job states in which a job was ended by the cluster, so that another one may go on.
TAKEN_AWAY = frozenset({"BOOT_FAIL", "NODE_FAIL", "PREEMPTED", "REVOKED", "TIMEOUT"})
#: What sbatch says of an outage, which may pass.
AWAY = re.compile(r"unable to contact|timed out|did not end|connect failure", re.IGNORECASE)
#: What sbatch says if too few hosts can run the job, for ever or because some are down now.
TOO_FEW = re.compile(r"node configuration is not available", re.IGNORECASE)
#: Reasons of a waiting job that waiting does not end; a site may refuse such jobs at once.
FOR_EVER = re.compile(r"PartitionTimeLimit|BadConstraints|Invalid|MaxWall|MaxNodePerJob")
#: States of a node that has failed, as sinfo prints them; * marks one that does not respond.
DEAD_NODE = re.compile(r"down|fail|\*", re.IGNORECASE)

SCRIPT = """#!/bin/bash
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
export KILN_ADDRESS=$address:$((20000 + SLURM_JOB_ID * 7 % 10000))
# An NFS client keeps what a job writes for up to half a minute: its hosts would seem silent.
(while sleep 1; do sync --data /proc/self/fd/1; done) 2> /dev/null &
trap "kill $!" EXIT
srun --kill-on-bad-exit=0 --wait=0 bash {flags} {commands}
"""


@dataclass
class SlurmEngine:
    """The jobs of one training.

    Attributes:
        owner: names the training in the names of its jobs.
        folder: for their output, on a disk that all hosts share.
    """

    settings: Slurm
    hosts: int
    owner: str
    folder: Path
    name: str = "slurm"
    _job: str = ""  # id of this attempt's job
    _output: Path = Path()
    _position: int = 0  # of the first unread byte of the output
    _state: tuple[str, str] = ("", "")  # and its reason
    _asked: float = 0.0  # time.monotonic() of the query
    _nodes: str = ""

    def reserve(self) -> bool:
        """Remove jobs that an earlier flow left; sbatch reserves and starts at once."""
        self._remove(_ask("squeue", "--noheader", f"--name={self._job_name}", "--format=%i"))
        return True

    def start(self, agents: Agents) -> None:
        """Submit the job, and wait until it runs. Raises Refused if it never will."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._output = self.folder / f"{self.owner}-{uuid4().hex[:8]}.log"
        self._position = 0
        command = ["sbatch", "--parsable", *self._options()]
        self._job = _submit(command, self._script(agents), self.settings).partition(";")[0]
        log.info("slurm: job %s is submitted, with its output in %s", self._job, self._output)
        told = self._query()
        while self._query()[0] in PENDING:
            check_held()
            if self._state != told:
                told = self._state
                log.info("slurm: job %s waits (%s)", self._job, told[1])
            if FOR_EVER.search(self._state[1]):
                self._remove(self._job)
                raise Refused(f"slurm: its job never starts ({self._state[1]}): ask for less")
            time.sleep(PENDING_SECONDS)

    def read(self, seconds: float) -> list[str] | None:
        """New lines of the job's output."""
        end = time.monotonic() + seconds
        while not (lines := self._new_lines()) and time.monotonic() < end:
            if not self._may_run():
                return self._new_lines() or None
            time.sleep(LINE_SECONDS)
        return lines

    def stop(self) -> None:
        """Signal the agents, but not the script that waits for them."""
        _ask("scancel", "--signal=TERM", self._job)

    def kill(self) -> None:
        """Cancel the job, and wait until its ranks have ended on all hosts that respond."""
        if self._job and self._query()[0] in PENDING | LIVE:
            _ask("scancel", "--signal=KILL", self._job)
            self._remove(self._job)

    def lost(self) -> str | None:
        """The job's hosts that are down, or why Slurm ended it. Raises JobStopped if a user did."""
        if not self._job:  # Slurm did not take it
            return None
        state, reason = self._query()
        if state == "CANCELLED":
            raise JobStopped(f"slurm: job {self._job} was cancelled; run again to resume")
        if state in TAKEN_AWAY:
            return f"job {self._job} ended with {state} ({reason})"
        if not self._nodes:
            return None
        nodes = _ask("sinfo", "--noheader", "--Node", f"--nodes={self._nodes}", "--format=%n %T")
        states = {line: line.rpartition(" ")[2] for line in nodes.splitlines()}
        dead = sorted(line for line, state in states.items() if DEAD_NODE.search(state))
        return f"hosts failed: {', '.join(dead)}" if dead else None

    def end(self) -> None:
        """Cancel what is left, and delete the output."""
        self.kill()
        for output in self.folder.glob(f"{self.owner}-*.log"):
            output.unlink(missing_ok=True)

    @property
    def _job_name(self) -> str:
        return f"kiln-{self.owner}"

    def _script(self, agents: Agents) -> str:
        host, address = '"$SLURM_NODEID"', '"$KILN_ADDRESS"'
        words = agents.command(host, address)
        agent = " ".join(word if word in (host, address) else shlex.quote(word) for word in words)
        setup = self.settings.setup
        flags = "-elc" if setup else "-c"  # a login shell has `module`; a failed command ends it
        return SCRIPT.format(
            flags=flags, commands=shlex.quote("\n".join([*setup, f"exec {agent}"]))
        )

    def _options(self) -> list[str]:
        return list_options(self.settings, self.hosts, self._job_name, str(self._output))

    def _new_lines(self) -> list[str]:
        """The complete lines after the position; a network file system may show them late."""
        try:
            with self._output.open("rb") as output:
                output.seek(self._position)
                data = output.read()
        except FileNotFoundError:  # the job has not begun to write
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._position += len(complete)
        return complete.decode(errors="replace").splitlines()

    def _query(self, age: float = 0.0) -> tuple[str, str]:
        """State and reason of the job, by a query that is at most `age` seconds old."""
        if time.monotonic() > self._asked + age:
            state, reason, nodes = _state_of(self._job)
            self._state = state, reason
            self._nodes = nodes or self._nodes
            self._asked = time.monotonic()
        return self._state

    def _may_run(self) -> bool:
        """Whether the job has not ended; agents also go on without the controller's answer."""
        try:
            self._query(STATE_SECONDS)
        except Away as error:
            log.warning("%s; the job runs on", error)
            self._asked = time.monotonic()
        return self._state[0] in PENDING | LIVE

    def _remove(self, jobs: str) -> None:
        """Cancel jobs, and wait for their end; a host that does not respond ends none."""
        for job in jobs.split():
            _ask("scancel", job)
            end = time.monotonic() + END_SECONDS
            while _state_of(job)[0] in PENDING | LIVE and time.monotonic() < end:
                time.sleep(LINE_SECONDS)


def list_options(settings: Slurm, hosts: int, name: str, output: str) -> list[str]:
    """The options of sbatch."""
    stated = {
        "job-name": name,
        "output": output,
        "nodes": hosts,
        "ntasks-per-node": 1,
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint,
        "exclude": settings.exclude,
        "gpus-per-node": settings.gpus_per_node,
        "gres": settings.gres,
        "cpus-per-task": settings.cpus_per_task,
        "mem": settings.memory,
        "time": settings.time_limit,
        "signal": None if settings.time_limit is None else f"TERM@{settings.stop_before}",
    }
    options = [f"--{option}={value}" for option, value in stated.items() if value is not None]
    return [*options, "--no-requeue", *settings.options]


def check(settings: Slurm, hosts: int) -> None:
    """Raise Refused if this machine cannot submit, or if the cluster can never run the jobs."""
    if shutil.which("sbatch") is None:
        raise Refused("slurm: sbatch is not installed here: run kiln where jobs are submitted")
    options = list_options(settings, hosts, "kiln", "/dev/null")
    _submit(["sbatch", "--test-only", *options], "#!/bin/bash\n", settings)


def _submit(command: Sequence[str], script: str, settings: Slurm) -> str:
    # A job gets all variables of sbatch's own environment, so this one has no secrets.
    environment = passed_environment(("SLURM_CONF", *settings.environment))
    try:
        return run_command(command, COMMAND_SECONDS, environment=environment, text=script)
    except subprocess.CalledProcessError as error:
        why = message_of(error)
        if AWAY.search(why):
            raise Away(f"slurm: sbatch fails: {why}") from None
        if TOO_FEW.search(why) and (down := _hosts_down()):
            raise Away(f"slurm: sbatch refuses the job: {why}; {down} is down") from None
        raise Refused(f"slurm: sbatch refuses the job: {why}") from None


def _hosts_down() -> str:
    return _ask("sinfo", "--noheader", "--states=down,drain,fail", "--format=%N")


def _state_of(job: str) -> tuple[str, str, str]:
    """State, reason and hosts of a job; GONE if Slurm has forgotten it."""
    form = "--format=%T|%r|%N"
    listed = _ask("squeue", "--noheader", "--states=all", f"--jobs={job}", form)
    if not listed:
        return "GONE", "", ""
    state, reason, nodes = listed.splitlines()[0].split("|", 2)
    return state, reason, nodes


def _ask(*command: str) -> str:
    """The output of a command; '' for a job that Slurm no longer knows. Raises Away."""
    try:
        return run_command(command, COMMAND_SECONDS)
    except subprocess.CalledProcessError as error:
        why = message_of(error)
        if "invalid job id" in why.lower() or "already completed" in why.lower():
            return ""
        raise Away(f"slurm: {command[0]} failed: {why}") from None
