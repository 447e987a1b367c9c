"""What a cluster does for a job: reserve machines, run an agent on each, read, stop, end.

The agent is `runtimes.process.host_agent`. `tasks.hosts.attempts` calls an engine in this order,
once an attempt: `reserve`, `start`, `read` until None, perhaps `stop` and `kill`; `end` is last.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

#: Seconds after the agent's grace in which it kills its ranks and says so.
AFTER_GRACE = 10.0
#: Variables of this machine that hosts get, besides those whose names a recipe lists.
PASSED = (
    *(
        "HOME",
        "LANG",
        "LC_ALL",
        "LD_LIBRARY_PATH",
        "LOGNAME",
        "PATH",
        "PYTHONPATH",
        "TMPDIR",
        "USER",
    ),
    *("HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE", "KILN_CACHE"),
)
#: Prefixes of variables without secrets that configure collectives and runtimes.
PASSED_PREFIXES = (
    *("ASCEND_", "HCCL_"),  # CANN's set_env.sh exports ASCEND_OPP_PATH and others
    *("GLOO_", "JAX_", "NCCL_", "OMP_", "PJRT_", "PT_HPU_", "XLA_"),
)

#: Variables that choose chips of this machine, not of a host.
OF_THIS_HOST = {"ASCEND_RT_VISIBLE_DEVICES", "ASCEND_DEVICE_ID"}


class Engine(Protocol):
    """The machines of a training on one kind of cluster.

    Every method raises Away if the cluster does not answer, and Refused for what it never accepts.

    Attributes:
        name: for logs and errors.
    """

    name: str

    def reserve(self) -> bool:
        """Wait for the machines; False if they were taken away before use.

        What an earlier attempt of this training left is used again or removed.
        """

    def start(self, agents: Agents) -> None:
        """Start an agent on each host."""

    def read(self, seconds: float) -> list[str] | None:
        """New lines of all agents; waits at most `seconds` for the first.

        An interrupted call loses no line. None: every line was given, and no agent speaks again.
        """

    def stop(self) -> None:
        """Send SIGTERM to every agent, and return at once."""

    def kill(self) -> None:
        """End all agents and their ranks without a checkpoint."""

    def lost(self) -> str | None:
        """Why machines are gone, such as `n2 is down`; None if all are there."""

    def end(self) -> None:
        """Give back the machines that this training reserved."""


@dataclass(frozen=True)
class Agents:
    """The agents of an attempt.

    Attributes:
        hosts: their number.
        job: path or URL of the job's file, which all hosts can read.
        grace: seconds for a checkpoint after SIGTERM.
        python: interpreter of the runtime, a path on the hosts.
    """

    hosts: int
    job: str
    grace: float
    python: str

    def command(self, host: str, address: str | None, *flags: str) -> list[str]:
        """The command line of one host's agent.

        Args:
            host: its number, from 0, or a shell variable with it.
            address: HOST:PORT at which rank 0 will listen; None if the runtime needs none.
        """
        module = [self.python, "-P", "-u", "-m", "runtimes.process.host_agent", self.job]
        numbers = ["--hosts", str(self.hosts), "--host", host, "--grace", f"{self.grace:g}"]
        return [*module, *numbers, *(["--address", address] if address else []), *flags]


def passed_environment(names: Iterable[str] = ()) -> dict[str, str]:
    """The variables of this machine that hosts get: without secrets, unless `names` lists them."""
    wanted = {*PASSED, *names}
    prefixed = {name for name in os.environ if name.startswith(PASSED_PREFIXES)} - OF_THIS_HOST
    return {name: value for name, value in os.environ.items() if name in wanted or name in prefixed}
