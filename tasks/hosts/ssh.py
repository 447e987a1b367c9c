"""Engine `ssh`: one agent a host by the OpenSSH client, for machines without a scheduler.

A lost connection ends the agent's standard input, which stops its ranks with a checkpoint.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from artifacts.lock import check_held
from configs.errors import Away, Refused
from configs.settings.clusters import Ssh
from tasks.hosts.commands import message_of, run_command
from tasks.hosts.engine import Agents, passed_environment
from tasks.hosts.lines import Lines

log = logging.getLogger("kiln")
#: A prompt would hang unseen; keep-alive detects a lost host within half a minute.
OPTIONS = (
    *("-oBatchMode=yes", "-oConnectTimeout=15"),
    *("-oServerAliveInterval=10", "-oServerAliveCountMax=3"),
)
OF_A_LOGIN = frozenset({"HOME", "LOGNAME", "TMPDIR", "USER"})
CHECK_SECONDS = 60.0
WAIT_SECONDS = 10.0  # between two questions to a host that does not answer
KILL_SECONDS = 20.0
CONNECTION_LOST = 255  # exit code of ssh for its own failures


@dataclass
class SshEngine:
    """The machines of a list.

    Attributes:
        work: the job's, which names the training in the agents' command lines.
    """

    settings: Ssh
    work: str
    name: str = "ssh"
    _job: str = ""  # URL of this attempt's job
    _agents: list[subprocess.Popen[str]] = field(default_factory=list)
    _lines: Lines = field(default_factory=Lines)

    def reserve(self) -> bool:
        """Wait until all hosts answer, and end what earlier attempts of this training left."""
        for host in self.settings.hosts:
            _wait_for(host)
        self._kill_agents(f"{self.work}/jobs/")
        return True

    def start(self, agents: Agents) -> None:
        """Connect to each host."""
        self._lines = Lines()
        self._agents = []
        self._job = agents.job
        settings = self.settings
        variables = _variables()
        secret = [f"-oSendEnv={name}" for name in settings.environment]
        for number, host in enumerate(settings.hosts):
            agent = agents.command(str(number), settings.rendezvous, "--watch-stdin")
            child = subprocess.Popen(
                _ssh(host, shlex.join(["env", *variables, *agent]), *secret),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
                errors="replace",
            )
            assert child.stdout is not None
            self._agents.append(child)
            self._lines.follow(child.stdout)

    def read(self, seconds: float) -> list[str] | None:
        """New lines of all agents."""
        return self._lines.read(seconds)

    def stop(self) -> None:
        """End the agents' standard input, for which they stop their ranks."""
        for agent in self._agents:
            assert agent.stdin is not None
            with suppress(OSError):  # it has ended
                agent.stdin.close()

    def kill(self) -> None:
        """Kill this attempt's agents, not a successor's; their ranks then end."""
        if self._job:
            self._kill_agents(self._job)
        for agent in self._agents:
            agent.kill()
            agent.wait()

    def _kill_agents(self, jobs: str) -> None:
        """Kill the agents of jobs whose URL begins so; a host that does not answer is skipped."""
        pattern = f"[h]ost_agent {re.escape(jobs)}"  # not of the shell that has it
        command = f"pkill -KILL -f {shlex.quote(pattern)} || true"
        for host in self.settings.hosts:
            try:
                _run(host, command, KILL_SECONDS)
            except Away as error:
                log.warning("ssh: %s", error)

    def lost(self) -> str | None:
        """The hosts whose connection was lost."""
        hosts = zip(self.settings.hosts, self._agents, strict=True)
        lost = [host for host, agent in hosts if agent.poll() == CONNECTION_LOST]
        return f"the connection to {', '.join(lost)} was lost" if lost else None

    def end(self) -> None:
        """End what is left."""
        if any(agent.poll() is None for agent in self._agents):
            self.kill()


def check(settings: Ssh, python: str, store: str | None) -> None:
    """Raise Refused if a host cannot be reached, or lacks the code or the store.

    Args:
        python: the runtime's interpreter.
        store: its folder; None if it is a URL.
    """
    if shutil.which("ssh") is None:
        raise Refused("ssh: the OpenSSH client is not installed here")
    module = "runtimes.process.host_agent"
    command = shlex.join(["env", *_variables(), python, "-P", "-m", module, "--help"])
    for host in settings.hosts:
        try:
            _run(host, f"{command} > /dev/null", CHECK_SECONDS)
        except Away as error:
            raise Refused(
                f"{error}: log in without a password, and install this code at the same path",
                setting="ssh.hosts",
            ) from None

    if store is not None:
        _check_shared(store, settings.hosts)


def _check_shared(folder: str, hosts: Sequence[str]) -> None:
    """Raise Refused for a host that does not see a new file of the folder."""
    os.makedirs(folder, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".shared-") as file:
        for host in hosts:
            try:
                _run(host, shlex.join(["test", "-e", file.name]), CHECK_SECONDS)
            except Away:
                raise Refused(
                    f"{host} does not share {folder}: set a folder that all hosts share, or a URL",
                    setting="store",
                ) from None


def _wait_for(host: str) -> None:
    """Wait until a host answers, which may start again. Raises LockLost."""
    is_told = False
    while True:
        try:
            return _run(host, "true", CHECK_SECONDS)
        except Away as error:
            if not is_told:
                log.info("ssh: waiting for %s", error)
            is_told = True
        check_held(ask=True)
        time.sleep(WAIT_SECONDS)


def _variables() -> list[str]:
    """NAME=VALUE of the variables that hosts get; a login has others of its own."""
    passed = passed_environment().items()
    return [f"{name}={value}" for name, value in passed if name not in OF_A_LOGIN]


def _ssh(host: str, command: str, *options: str) -> list[str]:
    """The client's command line, in which no host is read as an option."""
    return ["ssh", *OPTIONS, *options, "--", host, command]


def _run(host: str, command: str, seconds: float) -> None:
    """Run a shell command on a host. Raises Away if it fails."""
    try:
        run_command(_ssh(host, command), seconds)
    except subprocess.CalledProcessError as error:
        raise Away(f"{host}: {message_of(error)}") from None
