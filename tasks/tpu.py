"""Train on a Cloud TPU slice, controlled by gcloud.

A train job's slice is created, set up, recreated after a preemption, and deleted at the end. Its
workers run a packed part of this checkout. Failures of gcloud are distinguished.
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat, takewhile
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from artifacts.errors import retrying
from artifacts.image_shards import add_member
from artifacts.lock import LockLost, check_held
from artifacts.models import digest_model, files_below, put_model
from artifacts.store import Store
from configs.errors import Away, Refused
from configs.load_recipe import CHECKOUT
from configs.settings.recipe import Tpu
from configs.settings.train import Train
from runtimes.process.job import TrainJob, write_job
from runtimes.spmd.tpu_sharding import check_rows, check_training, parse_accelerator_type
from tasks.child_process import ChildOutput, Event, JobFailed, JobStopped, wait_for_result

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
    """The stripped output of a command. Raises CalledProcessError, also after `seconds`."""
    log.debug("%s", shlex.join(command))
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=seconds,
            env={**os.environ, "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"},  # a prompt would hang unseen
        )
    except subprocess.TimeoutExpired:
        why = f"gcloud did not end within {seconds:g} s"
        raise subprocess.CalledProcessError(-signal.SIGKILL, command, "", why) from None
    return done.stdout.strip()


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


def message_of(error: subprocess.CalledProcessError) -> str:
    return " ".join((error.stderr or error.stdout or "").split())[-500:]


#: The parts of a checkout that the workers need.
PACKED = (
    *("Makefile", "pyproject.toml", "requirements", "deploy/tpu"),  # deploy/server/.env is secret
    *("artifacts", "configs", "runtimes"),
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


POLL_SECONDS = 20.0
STATE_CHECKS = 3  # queries of the state after a failure
OUTAGE_SECONDS = 600.0  # for which an API that answered before is asked again
SIGNAL_SECONDS = 60.0  # timeout of a signal to the workers: a lost slice does not delay the end
SSH_LOST = 255


def check(tpu: Tpu, store: str, settings: Train) -> None:
    """Raise Refused if this machine or the recipe does not support training on a slice."""
    if (where := parse_accelerator_type(tpu.accelerator_type)) is not None:
        check_training(where, settings)
        check_rows(settings, where.hosts, where.chips // where.hosts)
    if shutil.which("gcloud") is None:
        raise Refused("tpu: gcloud is not installed here (or set `tpu` to null)")
    if not store.startswith("gs://"):
        raise Refused(f"tpu: a slice cannot read the store {store}: make it a gs:// URL")
    if settings.wandb is not None and settings.wandb.mode == "online":
        raise Refused("tpu: a slice does not get your W&B key: set train.wandb.mode offline")
    if not (CHECKOUT / "deploy/tpu/worker.sh").is_file():
        raise Refused("tpu: run kiln from a checkout: its code is copied to the slice")


def list_commands(tpu: Tpu) -> list[tuple[str, Command]]:
    """The (purpose, gcloud command) pairs of a run, in order; none is executed."""
    tpu_slice = Slice(tpu, "run")
    home = code_home(pack_code())
    job = f"{home}/job.json"
    queue = [("wait until it is ACTIVE", tpu_slice.describe_request())] if tpu.queued else []
    deletion = [] if tpu.keep else [("delete it", tpu_slice.delete())]
    return [
        ("is there a slice of this name?", tpu_slice.describe()),
        ("create it", tpu_slice.create()),
        *queue,
        ("wait until it is READY", tpu_slice.describe()),
        ("copy the code to every worker", tpu_slice.copy(Path("kiln.tgz"), f"{home}.tgz")),
        ("set every worker up", tpu_slice.ssh(_set_up(home))),
        ("copy the job", tpu_slice.copy(Path("job.json"), job)),
        ("train on every worker and stream the first one's log", tpu_slice.ssh(_train(job, tpu))),
        *deletion,
    ]


def run_on_slice(
    tpu: Tpu,
    job: TrainJob,
    on_event: Callable[[Event], None],
    *,
    store: Store,
    grace_seconds: float = 60.0,
    poll_seconds: float = POLL_SECONDS,
) -> Event:
    """Run a train job on a slice, as `tasks.child_process.run_job` does on this machine.

    After a preemption, training resumes from its last checkpoint on a new slice. A slice of this
    run that an earlier attempt could not delete is used, and deleted at the end.

    Args:
        store: a store that the slice can read and write.
        grace_seconds: time for a checkpoint after a cancellation.
        poll_seconds: interval of the state queries.

    Raises:
        Away: gcloud cannot create the slice, or it was preempted too often.
        Refused, OSError, JobFailed, Away, LockLost: as `tasks.child_process.run_job`.
    """
    owner = hashlib.sha256(job.work.encode()).hexdigest()[:20]
    vae = None if job.vae is None else _in_store(store, job.vae)
    job = replace(job, model=_in_store(store, job.model), vae=vae)
    run = _SliceRun(Slice(tpu, owner), job, on_event, grace_seconds, poll_seconds)
    try:
        return run.train_with_restarts(tpu.restarts)
    finally:
        run.end()


@dataclass
class _SliceRun:
    slice: Slice
    job: TrainJob
    on_event: Callable[[Event], None]
    grace_seconds: float
    poll_seconds: float
    is_ours: bool = False  # made for this training, which therefore deletes it
    code: bytes = field(default_factory=pack_code)
    attempt: str = field(default_factory=lambda: uuid4().hex[:8])
    _answered: bool = False  # gcloud works, so that a failure is an outage

    @property
    def home(self) -> str:
        return code_home(self.code)

    @property
    def job_file(self) -> str:
        """Path of the job on a worker; each attempt has its own, so that no other is stopped."""
        return f"{self.home}/job-{self.attempt}.json"

    def train_with_restarts(self, restarts: int) -> Event:
        """Train, on up to `restarts` further slices after preemptions."""
        for left in range(restarts, -1, -1):
            if not self._make():
                log.warning("tpu: the slice was taken away unused; %d more restarts", left)
                self.delete()
                continue
            try:
                self._send()
                return self._train()
            except (JobFailed, OSError, Away, subprocess.CalledProcessError) as error:
                check_held(ask=True)  # a successor trains on the slice, or has deleted it
                state = self._settled_state()
                self._request()  # raises for that of another training
                if state != "READY":
                    log.warning("tpu: the slice is %s; %d more restarts", state or "gone", left)
                    self.delete()
                elif _is_cut_off(error):
                    log.warning("tpu: the connection was lost; %d more attempts", left)
                elif isinstance(error, subprocess.CalledProcessError):
                    raise Away(f"the slice cannot be set up: {message_of(error)}") from None
                else:
                    raise  # the job itself failed, so a new slice would not help
        raise Away("the slice was preempted or cut off too often: raise tpu.restarts or run again")

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

    def _make(self) -> bool:
        """Wait until the slice is ready, as `_wait`; create it if it does not exist.

        Raises Away, also for a slice that another run will delete.
        """
        state = self._state()
        request = self._request()
        if state in DEAD_STATES or request in FAILED_REQUESTS:
            self.delete()
            state = request = None
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
        """Copy code and job to every worker, and set up the environment."""
        with tempfile.TemporaryDirectory(prefix="kiln-tpu-") as folder:
            code = Path(folder, "kiln.tgz")
            job = Path(folder, "job.json")
            code.write_bytes(self.code)
            write_job(self.job, job)
            log.info("tpu: setting up (minutes, once per slice)")
            run_command(self.slice.copy(code, f"{self.home}.tgz"))
            run_command(self.slice.ssh(_set_up(self.home)))
            run_command(self.slice.copy(job, self.job_file))

    def _train(self) -> Event:
        check_held(ask=True)  # the set-up took minutes, and the job stops that of a successor
        child = subprocess.Popen(
            self.slice.ssh(_train(self.job_file, self.slice.tpu)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        output = ChildOutput(self.on_event)
        pumps = (lambda: output.mixed(child.stdout),)
        ends = (partial(self._stop, child), partial(self._kill, child))
        return wait_for_result(child, output, pumps, *ends)

    def _stop(self, child: subprocess.Popen[str]) -> None:
        """Signal every worker to checkpoint and exit; kill them after the grace period."""
        log.info("tpu: stopping (it has %g s to checkpoint)", self.grace_seconds)
        with suppress(subprocess.CalledProcessError):
            run_command(self.slice.ssh(_signal(self.job_file, signal.SIGTERM)), SIGNAL_SECONDS)
        try:
            child.wait(self.grace_seconds)
        except BaseException:
            self._kill(child)

    def _kill(self, child: subprocess.Popen[str]) -> None:
        """Kill the job on every worker, then the connection to them."""
        with suppress(subprocess.CalledProcessError):
            run_command(self.slice.ssh(_signal(self.job_file, signal.SIGKILL)), SIGNAL_SECONDS)
        child.kill()
        child.wait()


def _set_up(home: str) -> str:
    return f"mkdir -p {home} && tar -xzf {home}.tgz -C {home} && bash {home}/deploy/tpu/setup.sh"


def _is_cut_off(error: Exception) -> bool:
    """Whether the job may go on where it was: ssh was lost, or a worker's, which stops all."""
    lost = isinstance(error, JobFailed) and error.code == SSH_LOST
    return lost or isinstance(error, JobStopped)


def _train(job: str, tpu: Tpu) -> str:
    flags = f"LIBTPU_INIT_ARGS={shlex.quote(tpu.libtpu_args)} " if tpu.libtpu_args else ""
    return f"{flags}bash {Path(job).parent}/deploy/tpu/worker.sh {job}"


def _signal(job: str, number: signal.Signals) -> str:
    pattern = job.replace(".", "[.]")  # no pattern of the shell that has it as an argument
    return f"pkill --signal {number.name} -f 'runtimes .*/{pattern}' || true"


def _in_store(store: Store, folder: str) -> str:
    """URL of a model's folder in the store, where a slice can read it; copied if missing."""
    root = Path(folder)
    files = {str(path.relative_to(root)): path for path in files_below(root)}
    return put_model(store, digest_model(root), files)
