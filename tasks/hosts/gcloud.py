"""Engine `tpu`: a Cloud TPU slice that gcloud creates, sets up, and deletes at the end.

Its workers run a packed part of this checkout. One ssh command of gcloud starts an agent on every
worker, and its output has the lines of all. A slice outlives a killed flow: its label names the
training that uses it again, or deletes it.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import os
import shlex
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat, takewhile
from pathlib import Path
from typing import TypeVar

from artifacts.errors import retrying
from artifacts.image_shards import add_member
from artifacts.lock import LockLost, check_held
from artifacts.models import files_below
from configs.errors import Away, Refused
from configs.load_recipe import CHECKOUT
from configs.settings.clusters import Tpu
from configs.settings.recipe import Recipe, StageName
from configs.settings.train import Train
from runtimes.spmd.tpu_sharding import check_rows, check_training, parse_accelerator_type
from tasks.hosts import commands
from tasks.hosts.commands import message_of
from tasks.hosts.engine import Agents
from tasks.hosts.lines import Lines

Command = list[str]
T = TypeVar("T")
#: States of the TPU API's `Node.State` that lead to READY without intervention.
PENDING_STATES = frozenset({"CREATING", "STARTING", "RESTARTING", "REPAIRING"})
#: States of `Node.State` that never lead to READY.
DEAD_STATES = frozenset({"PREEMPTED", "TERMINATED", "STOPPED", "STOPPING", "DELETING", "HIDDEN"})
#: States of `QueuedResourceState` of a request that is never fulfilled.
FAILED_REQUESTS = frozenset({"FAILED", "SUSPENDING", "SUSPENDED", "DELETING"})
#: The label of a slice that a run deletes at its end; its value is `Slice.owner`.
LABEL = "kiln_run"
#: Keep-alive of ssh and scp: a lost worker is detected within two minutes.
ALIVE = ("-oServerAliveInterval=30", "-oServerAliveCountMax=4")


@dataclass(frozen=True)
class Slice:
    """The gcloud commands for one slice.

    Attributes:
        owner: names the training, whose attempts share the slice.
    """

    tpu: Tpu
    owner: str

    def create(self) -> Command:
        """Create the slice; with `queued`, request it without waiting."""
        tpu = self.tpu
        which = [f"--accelerator-type={tpu.accelerator_type}"]
        if tpu.queued:
            which += [f"--runtime-version={tpu.software}", f"--node-id={tpu.name}"]
        else:
            which += [f"--version={tpu.software}"]
        if tpu.capacity != "on_demand":
            which.append(f"--{tpu.capacity}")
        if not tpu.keep:
            which.append(f"--labels={LABEL}={self.owner}")
        for name in ("network", "subnetwork", "service_account"):
            if (value := getattr(tpu, name)) is not None:
                which.append(f"--{name.replace('_', '-')}={value}")
        return [*self._about("queued-resources" if tpu.queued else "tpu-vm", "create"), *which]

    def describe(self) -> Command:
        """Print the slice's state, a tab and its owner; fails if it does not exist."""
        return [*self._about("tpu-vm", "describe"), f"--format=value(state,labels.{LABEL})"]

    def describe_request(self) -> Command:
        """Print the state of the queued request for the slice, a tab and its owner."""
        state = f"state.state,tpu.nodeSpec[0].node.labels.{LABEL}"
        return [*self._about("queued-resources", "describe"), f"--format=value({state})"]

    def delete(self) -> Command:
        """Delete the slice and its queued request."""
        if self.tpu.queued:
            return [*self._about("queued-resources", "delete"), "--force", "--quiet"]
        return [*self._about("tpu-vm", "delete"), "--quiet"]

    def copy(self, file: Path, target: str) -> Command:
        """Copy a file to every worker."""
        flags = [*(f"--scp-flag={flag}" for flag in ALIVE), f"{self.tpu.name}:{target}"]
        return [*self._about("tpu-vm", "scp", str(file)), *flags, "--worker=all"]

    def ssh(self, script: str) -> Command:
        """Run a shell script on every worker."""
        alive = [f"--ssh-flag={flag}" for flag in ALIVE]
        return [*self._about("tpu-vm", "ssh"), "--worker=all", *alive, f"--command={script}"]

    def _about(self, kind: str, verb: str, operand: str | None = None) -> Command:
        operand = operand or self.tpu.name
        project = [] if self.tpu.project is None else [f"--project={self.tpu.project}"]
        location = [f"--zone={self.tpu.zone}", *project]
        return ["gcloud", "compute", "tpus", kind, verb, operand, *location]


COMMAND_SECONDS = 3600.0  # timeout; creation and set-up take minutes
QUERY_SECONDS = 60.0  # timeout of a query of a state
log = logging.getLogger("kiln")


def run_command(command: Command, seconds: float = COMMAND_SECONDS) -> str:
    """As `commands.run_command`."""
    without_prompts = {**os.environ, "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}  # one would hang unseen
    return commands.run_command(command, seconds, environment=without_prompts)


def describe(command: Command) -> str:
    """The output of a `describe` command; '' if the resource does not exist."""
    try:
        return run_command(command, QUERY_SECONDS)
    except subprocess.CalledProcessError as error:
        if is_missing(error):
            return ""
        raise Away(f"gcloud does not answer: {message_of(error)}") from None


def is_missing(error: subprocess.CalledProcessError) -> bool:
    return "NOT_FOUND" in error.stderr or "not found" in error.stderr.lower()


#: The parts of a checkout that the workers need.
PACKED = (
    *("Makefile", "pyproject.toml", "requirements", "deploy/tpu"),  # deploy/server/.env is secret
    *("artifacts", "configs", "runtimes", "tasks"),
)


def pack_code() -> bytes:
    """A gzipped tar of the PACKED files, deterministic for equal code."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(p for name in PACKED for p in _files(CHECKOUT / name)):
            name = str(path.relative_to(CHECKOUT))
            mode = path.stat().st_mode & 0o777
            add_member(tar, name, path.read_bytes(), mode)
    return gzip.compress(buffer.getvalue(), compresslevel=6, mtime=0)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [p for p in files_below(path) if "__pycache__" not in p.parts]


def code_home(code: bytes) -> str:
    """The folder of this code on a worker, relative to the home folder."""
    return f"kiln-{hashlib.sha256(code).hexdigest()[:12]}"


POLL_SECONDS = 20.0  # interval of the queries of the state
STATE_CHECKS = 3  # queries of the state after a failure
OUTAGE_SECONDS = 600.0  # for which an API that answered before is asked again
SIGNAL_SECONDS = 60.0  # timeout of a signal to the workers: a lost slice does not delay the end


def check(tpu: Tpu, recipe: Recipe, stages: Collection[StageName]) -> None:
    """Raise Refused if this machine or the recipe does not support stages on a slice."""
    for stage in stages:
        if stage == "train":
            _check_training(tpu, recipe.train, recipe.runtime)
        else:
            for part in recipe.by_source.values():
                _check_stage(tpu, stage, part.hosts_of(stage))
    if shutil.which("gcloud") is None:
        raise Refused("tpu: gcloud is not installed here (or set `tpu` to null)")
    if not recipe.store.startswith("gs://"):
        raise Refused(f"tpu: a slice cannot read the store {recipe.store}: make it a gs:// URL")
    if not (CHECKOUT / "deploy/tpu/worker.sh").is_file():
        raise Refused("tpu: run kiln from a checkout: its code is copied to the slice")
    _listed_environment(tpu)


def _check_training(tpu: Tpu, settings: Train, runtime: str) -> None:
    hosts = hosts_of(tpu, settings.hosts)
    if (where := parse_accelerator_type(tpu.accelerator_type)) is not None:
        check_training(where, settings)
        if runtime == "xla":
            check_rows(settings, hosts, where.chips // hosts)
    if settings.processes > 1:
        raise Refused(
            "one process has all chips of a slice's host: set 1", setting="train.processes"
        )


def _check_stage(tpu: Tpu, stage: StageName, stated: int | None) -> None:
    setting = f"{stage}.hosts"
    if stage in ("describe", "caption"):
        raise Refused("its models run by PyTorch, which has no TPU: set null", setting=setting)
    if stated is not None and stated != (hosts := hosts_of(tpu, stated)):
        words = f"a {tpu.accelerator_type} has {hosts} hosts, not {stated}: set {hosts}"
        raise Refused(words, setting=setting)


def hosts_of(tpu: Tpu, stated: int) -> int:
    """Number of a slice's machines; `stated` for a kind of accelerator that is not known here."""
    kind, _, size = tpu.accelerator_type.partition("-")
    if kind in ("v2", "v3") and size.isdigit():
        return max(1, int(size) // 8)  # a machine has 8 cores
    where = parse_accelerator_type(tpu.accelerator_type)
    return stated if where is None else where.hosts


def list_commands(tpu: Tpu, runtime: str, hosts: int, grace: float) -> list[tuple[str, Command]]:
    """The (purpose, gcloud command) pairs of a run, in order; none is executed."""
    tpu_slice = Slice(tpu, "run")
    home = code_home(pack_code())
    agents = Agents(hosts, "gs://STORE/train/KEY/jobs/ATTEMPT.json", grace, "")
    queue = [("wait until it is ACTIVE", tpu_slice.describe_request())] if tpu.queued else []
    variables = [("copy the listed variables", tpu_slice.copy(Path("environment"), f"{home}.env"))]
    deletion = [] if tpu.keep else [("delete it", tpu_slice.delete())]
    return [
        ("is there a slice of this name?", tpu_slice.describe()),
        ("create it", tpu_slice.create()),
        *queue,
        ("wait until it is READY", tpu_slice.describe()),
        ("copy the code to every worker", tpu_slice.copy(Path("kiln.tgz"), f"{home}.tgz")),
        *(variables if tpu.environment else []),
        ("set every worker up", tpu_slice.ssh(_set_up(home, runtime))),
        (
            "train on every worker, whose agents say how it goes",
            tpu_slice.ssh(_train(home, runtime, agents, tpu)),
        ),
        *deletion,
    ]


@dataclass
class GcloudEngine:
    """The slice of one training.

    Attributes:
        runtime: jax or xla, whose environment the workers get.
    """

    slice: Slice
    runtime: str
    poll_seconds: float = POLL_SECONDS
    name: str = "tpu"
    is_ours: bool = False  # made for this training, which therefore deletes it
    code: bytes = field(default_factory=pack_code)
    _answered: bool = False  # gcloud works, so that a failure is an outage
    _is_lost: bool = False  # whether the slice was taken away, so that nothing can run there
    _job: str = ""  # URL of this attempt's job
    _connection: subprocess.Popen[str] | None = None  # to all workers
    _lines: Lines = field(default_factory=Lines)

    @property
    def home(self) -> str:
        """The folder of the code on a worker."""
        return code_home(self.code)

    def reserve(self) -> bool:
        """Wait for the slice; create it if it does not exist. False if it was taken away.

        Raises Away, also for a slice that another run will delete.
        """
        state = self._state()
        request = self._request()
        if self._is_lost or state in DEAD_STATES or request in FAILED_REQUESTS:
            self.delete()
            state = request = None
        self._is_lost = False
        if state is None and request is None:
            log.info("tpu: creating %s", self.slice.tpu.name)
            check_held(ask=True)
            self.is_ours = True  # also if gcloud is interrupted: Google goes on
            try:
                run_command(self.slice.create())
            except subprocess.CalledProcessError as error:
                self.is_ours = "already exists" not in error.stderr.lower().replace("_", " ")
                raise Away(f"gcloud did not create the slice: {message_of(error)}") from None
        return self._wait()

    def start(self, agents: Agents) -> None:
        """Send the code, set up the environment, and start the agents."""
        self._job = agents.job
        try:
            self._send()
        except subprocess.CalledProcessError as error:
            raise Away(f"the slice cannot be set up: {message_of(error)}") from None
        check_held(ask=True)  # the set-up took minutes, and the agents stop those of a successor
        self._connection = subprocess.Popen(
            self.slice.ssh(_train(self.home, self.runtime, agents, self.slice.tpu)),
            stdin=subprocess.PIPE,  # its end stops the agents
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self._lines = Lines()
        self._lines.follow(self._connection.stdout or ())

    def read(self, seconds: float) -> list[str] | None:
        """New lines of the connection, which ends with the last agent, or if it is cut."""
        return self._lines.read(seconds)

    def stop(self) -> None:
        """Signal every worker's agent; a new connection that hangs is given up after a minute."""
        if self._connection is not None and self._connection.stdin is not None:
            self._connection.stdin.close()  # agents also stop at the end of their standard input
        with suppress(subprocess.CalledProcessError):
            run_command(self.slice.ssh(_signal(self._job, signal.SIGTERM)), SIGNAL_SECONDS)

    def kill(self) -> None:
        """Kill agents and ranks on every worker, then the connection to them."""
        if (connection := self._connection) is None:
            return
        if not self._is_lost:
            with suppress(subprocess.CalledProcessError):
                run_command(self.slice.ssh(_signal(self._job, signal.SIGKILL)), SIGNAL_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(connection.pid, signal.SIGKILL)
        connection.wait()
        self._connection = None

    def lost(self) -> str | None:
        """The slice's state unless it is READY. Raises Away for another training's slice."""
        state = self._settled_state()
        self._request()  # raises for that of another training
        if state == "READY":
            return None
        self._is_lost = True
        return f"the slice is {state or 'gone'}"

    def end(self) -> None:
        """Delete the slice if it belongs to this run, and no successor has it."""
        if not self.is_ours or self.slice.tpu.keep:
            return
        try:
            self.delete()
        except LockLost:
            command = shlex.join(self.slice.delete())
            log.warning("tpu: the slice is left to another builder; else delete it: %s", command)

    def delete(self) -> None:
        """Delete the slice if it exists; a failure is logged, since it must not hide another.

        An outage is waited for. Raises LockLost: a successor may use a slice of this name.
        """
        try:
            self._patiently(self._delete)
        except Away as error:
            message = "tpu: %s may remain and cost money: delete it (%s)"
            log.warning(message, self.slice.tpu.name, error)

    def _delete(self) -> None:
        check_held(ask=True)
        try:
            run_command(self.slice.delete())
        except subprocess.CalledProcessError as error:
            if not is_missing(error):
                raise Away(message_of(error)) from None

    def _patiently(self, work: Callable[[], T]) -> T:
        """The result of `work`; an Away is waited for, for OUTAGE_SECONDS."""
        end = time.monotonic() + OUTAGE_SECONDS
        waits = takewhile(lambda _: time.monotonic() <= end, repeat(self.poll_seconds))
        return retrying(work, waits, words="tpu: {}".format)

    def _wait(self) -> bool:
        """Whether the slice becomes ready, and is not preempted before. Raises Away."""
        while (state := self._state()) != "READY":
            if state in DEAD_STATES:
                return False
            request = self._request()
            if request in FAILED_REQUESTS:
                raise Away(f"the request for the slice is {request}")
            if state not in PENDING_STATES and request is None:
                raise Away(f"the slice is {state or 'missing'} and not requested")
            log.info("tpu: waiting, the slice is %s", state or request)
            time.sleep(self.poll_seconds)
        return True

    def _settled_state(self) -> str | None:
        """The slice's state after a failure; the API reports a preemption with a delay."""
        for _ in range(STATE_CHECKS):
            if (state := self._state()) != "READY":
                return state
            time.sleep(self.poll_seconds)
        return "READY"

    def _state(self) -> str | None:
        """The slice's state; None if there is no slice. Raises Away for another training's."""
        return self._owned(self.slice.describe(), DEAD_STATES)

    def _request(self) -> str | None:
        """The state of the queued request; None without a request. Raises as `_state`."""
        if not self.slice.tpu.queued:
            return None
        return self._owned(self.slice.describe_request(), FAILED_REQUESTS)

    def _owned(self, command: Command, dead: frozenset[str]) -> str | None:
        """The state that a `describe` command prints; it says whether the resource is ours."""
        state, _, owner = self._ask(command).partition("\t")
        if state:
            self.is_ours = owner == self.slice.owner
        if owner and not self.is_ours and state not in dead:
            raise Away(
                f"the slice {self.slice.tpu.name} is of another training, whose run deletes it: "
                "give this one another tpu.name; or, if no such run is left, delete it: "
                f"{shlex.join(self.slice.delete())}"
            )
        return state or None

    def _ask(self, command: Command) -> str:
        """The output of a `describe` command, '' if there is no such resource.

        An outage is waited for, unless gcloud never worked: a slice that trains is not given up.
        """
        ask = partial(describe, command)
        answer = self._patiently(ask) if self._answered else ask()
        self._answered = True
        return answer

    def _send(self) -> None:
        """Copy the code to every worker, and set up the environment."""
        with tempfile.TemporaryDirectory(prefix="kiln-tpu-") as folder:
            code = Path(folder, "kiln.tgz")
            code.write_bytes(self.code)
            log.info("tpu: setting up (minutes, once per slice)")
            run_command(self.slice.copy(code, f"{self.home}.tgz"))
            if variables := _listed_environment(self.slice.tpu):
                listed = Path(folder, "environment")
                listed.touch(mode=0o600)  # scp copies the mode: others must not read secrets
                listed.write_text(_export(variables))
                run_command(self.slice.copy(listed, f"{self.home}.env"))
            run_command(self.slice.ssh(_set_up(self.home, self.runtime)))


def _listed_environment(tpu: Tpu) -> dict[str, str]:
    """The variables that `tpu.environment` lists. Raises Refused for one that is not set here."""
    if unset := [name for name in tpu.environment if name not in os.environ]:
        raise Refused(f"{', '.join(unset)}: not set here", setting="tpu.environment")
    return {name: os.environ[name] for name in tpu.environment}


def _export(variables: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def _set_up(home: str, runtime: str) -> str:
    unpack = f"mkdir -p {home} && tar -xzf {home}.tgz -C {home}"
    return f"{unpack} && bash {home}/deploy/tpu/setup.sh {runtime}"


def _train(home: str, runtime: str, agents: Agents, tpu: Tpu) -> str:
    flags = f"LIBTPU_INIT_ARGS={shlex.quote(tpu.libtpu_args)} " if tpu.libtpu_args else ""
    words = (runtime, shlex.quote(agents.job), str(agents.hosts), f"{agents.grace:g}")
    return f"{flags}bash {home}/deploy/tpu/worker.sh {' '.join(words)}"


def _signal(job: str, number: signal.Signals) -> str:
    """A script that signals the agent of a job; SIGKILL reaches its rank, too."""
    attempt = job.rpartition("/")[2].replace(".", "[.]")  # so that it does not match this script
    pattern = f"'host_agent .*/{attempt}'"
    if number != signal.SIGKILL:
        return f"pkill --signal {number.name} -f {pattern} || true"
    kill = "pkill -KILL -P $agent; kill -KILL $agent"
    return f"for agent in $(pgrep -f {pattern}); do {kill}; done; true"
