"""A real Slurm of two nodes on this machine, from the programs of `make setup-slurm`."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from chips import unless_required
from loopback_server import free_port
from waiting import wait_until

UNPACKED = Path(sys.prefix).with_name(f"{Path(sys.prefix).name}-slurm") / "bin"
NODES = ("n1", "n2")
START_SECONDS = 30  # for a busy machine
#: `config_overrides`: a node may have more cores and memory than this machine.
CONFIGURATION = """\
ClusterName=kiln
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
{plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdTimeout={slurmd_timeout}
InactiveLimit=0
KillWait=15
JobRequeue=1
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
{nodes}
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes=n1,n2 MaxTime=2 State=UP
"""


def require_slurm() -> None:
    """Skip the calling test without Slurm; fail it if KILN_MUST_RUN names slurm."""
    there = _program("slurmctld") and _program("munged")
    reason = "" if there else f"no {UNPACKED.parent.name}: make setup-slurm (Debian, Ubuntu)"
    if unless_required("slurm", reason):
        pytest.skip(reason)


@dataclass
class SlurmCluster:
    """A running cluster.

    Attributes:
        folder: its configuration, state and logs.
        environment: the variables PATH and SLURM_CONF, by which commands find the cluster.
        ports: port of each node's daemon.
    """

    folder: Path
    environment: dict[str, str]
    ports: dict[str, int]
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run(self, *command: str | Path, text: str = "") -> str:
        """The standard output of a command; `text` is its standard input."""
        done = subprocess.run(
            command,
            env={**os.environ, **self.environment},
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def jobs(self) -> list[str]:
        """Ids of all jobs that wait or run."""
        return self.run("squeue", "--noheader", "--format=%i").split()

    def node_state(self, node: str) -> str:
        """The state of a node in Slurm's words, such as IDLE, ALLOCATED or DOWN*."""
        return self.run("sinfo", "--noheader", f"--nodes={node}", "--format=%T").upper().split()[0]

    def processes(self, node: str) -> list[int]:
        """Ids of a node's daemon, of its job steps, and of all that the steps have started."""
        spool = self.folder / f"spool-{node}"  # daemon and step daemons run there
        of_task = {f"SLURM_CONF={self.folder}/slurm.conf", f"SLURMD_NODENAME={node}"}
        parents = {}
        found = set()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                status = (entry / "stat").read_text(errors="replace")
                is_daemon = (entry / "cwd").readlink() == spool
            except OSError:  # it has ended
                continue
            parents[int(entry.name)] = int(status.rpartition(")")[2].split()[1])
            if is_daemon or of_task <= set(variables):
                found.add(int(entry.name))
        while more := {child for child, parent in parents.items() if parent in found} - found:
            found |= more
        return sorted(found)

    def signal_node(self, node: str, number: signal.Signals) -> None:
        """Send a signal to all processes of a node, until none is new."""
        sent: set[int] = set()
        while more := set(self.processes(node)) - sent:
            for process in more:
                with suppress(ProcessLookupError):
                    os.kill(process, number)
            sent |= more

    def kill(self, node: str) -> None:
        """End a node as a power cut does."""
        self.signal_node(node, signal.SIGKILL)
        self._daemons.pop(node).wait()

    def freeze(self, node: str) -> None:
        """Stop a node as a hung machine or a cut cable does: connections stay, nothing answers."""
        self.signal_node(node, signal.SIGSTOP)

    def start(self, node: str) -> None:
        """Bring a node up (again); what is left of it ends first, as by a reboot."""
        if node in self._daemons:
            self.kill(node)
        # Slurm ends the jobs of a machine that has booted since, which no node here does.
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=reboot")
        self._start_node(node)
        self._wait_up(node)

    def _start_node(self, node: str) -> None:
        words = ("-D", "-N", node, "-d", _program("slurmstepd"))
        self._start(node, "slurmd", *words, folder=self.folder / f"spool-{node}")

    def _wait_up(self, node: str) -> None:
        """Wait until a node answers; the controller believes in a killed one for a while."""
        up = {"IDLE", "ALLOCATED", "MIXED", "COMPLETING"}
        wait_until(
            lambda: listens(self.ports[node]) and self.node_state(node) in up,
            START_SECONDS,
            says=lambda: (self.node_state(node), self._log(node)),
        )

    def _start(self, name: str, program: str, *words: str, folder: Path | None = None) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [_program(program), *words],
                env={**os.environ, **self.environment},
                cwd=folder or self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]

    def _stop(self) -> None:
        for node in NODES:
            self.signal_node(node, signal.SIGKILL)
        for daemon in self._daemons.values():
            daemon.kill()  # its state is deleted with the folder
        for daemon in self._daemons.values():
            daemon.wait()


@contextmanager
def slurm_cluster(*, cpus: int = 4, slurmd_timeout: int = 300) -> Iterator[SlurmCluster]:
    """Run munged, slurmctld and slurmd of nodes n1 and n2 on loopback, until the block ends.

    Args:
        cpus: cores of each node.
        slurmd_timeout: seconds after which a silent node is DOWN; 300 is Slurm's default.
    """
    require_slurm()
    # A socket's path has at most 107 bytes, which pytest's folders with names of tests exceed.
    folder = Path(tempfile.mkdtemp(prefix="kiln-slurm-"))
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    folder.chmod(0o755)  # munged refuses a socket that others could not reach
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    node = f"NodeAddr=127.0.0.1 NodeHostname={socket.gethostname()} CPUs={cpus} RealMemory=65536"
    ports = {name: free_port() for name in NODES}
    plugins = next(UNPACKED.parent.glob("usr/lib/*/slurm-wlm"), None)
    configuration = CONFIGURATION.format(
        folder=folder,
        user=getpass.getuser(),
        port=free_port(),
        plugins=f"PluginDir={plugins}" if plugins else "",
        slurmd_timeout=slurmd_timeout,
        nodes="\n".join(f"NodeName={name} {node} Port={ports[name]}" for name in NODES),
    )
    (folder / "slurm.conf").write_text(configuration)
    environment = {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": f"{UNPACKED}:{os.environ['PATH']}",
    }
    cluster = SlurmCluster(folder, environment, ports)
    try:
        cluster._start("munged", "munged", *_munge_options(folder))
        wait_until(
            (folder / "munge.sock").exists, START_SECONDS, says=lambda: cluster._log("munged")
        )
        cluster._start("slurmctld", "slurmctld", "-D", "-i")
        for name in NODES:
            cluster._start_node(name)
        for name in NODES:
            cluster._wait_up(name)
        yield cluster
    finally:
        cluster._stop()
        shutil.rmtree(folder, ignore_errors=True)


def listens(port: int) -> bool:
    """Whether something listens at a port of loopback."""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def _munge_options(folder: Path) -> Sequence[str]:
    files = {
        "key-file": "munge.key",
        "socket": "munge.sock",
        "pid-file": "munged.pid",
        "log-file": "munged.messages",
        "seed-file": "munge.seed",
    }
    # It refuses folders of another owner above its files, such as /tmp, unless it is forced.
    return ["--foreground", "--force", *(f"--{key}={folder / name}" for key, name in files.items())]


def _program(name: str) -> str:
    """The path of a program; empty: there is none."""
    return shutil.which(name, path=f"{UNPACKED}:{os.environ['PATH']}:/usr/sbin") or ""
