"""Send a train job to a slice: make it, set it up, run the job on every worker, take it again when
it has been preempted, delete it.
"""

from __future__ import annotations

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
from dataclasses import replace
from pathlib import Path

from artifacts.models import digest_model
from artifacts.store import Store
from configs.tpu import Tpu
from configs.training import Wandb
from runtimes.contract import WrongInput
from runtimes.process.job import TrainJob, write_job
from tasks.process import Event, Heard, JobFailed, attend
from tasks.stage import TransientError
from tasks.tpu.commands import COMING, GONE, REFUSED, Command, Slice

#: Of a checkout, what a training process and its set-up need.
SENT = ("Makefile", "pyproject.toml", "requirements", "artifacts", "configs", "runtimes", "deploy")
ROOT = Path(__file__).parents[2]
POLL_SECONDS = 20.0
LATER = 3  # times that are asked
COMMAND_SECONDS = 3600.0  # making or setting up a slice takes minutes
SSH_LOST = 255
log = logging.getLogger("kiln")


class NoSlice(TransientError):
    """There is no slice to be had now; the message says why."""


def check(tpu: Tpu, store: str, wandb: Wandb | None) -> None:
    """Raise WrongInput if training could not be sent to a slice from here."""
    if shutil.which("gcloud") is None:
        raise WrongInput("tpu: gcloud is not installed here (or set `tpu` to null)")
    if not store.startswith("gs://"):
        raise WrongInput(f"tpu: a slice cannot read the store {store}: make it a gs:// URL")
    if wandb is not None and wandb.mode == "online":
        raise WrongInput("tpu: your key for W&B is not sent to a slice: train.wandb.mode offline")
    if not (ROOT / "deploy/tpu/worker.sh").is_file():
        raise WrongInput("tpu: run kiln from a checkout, whose code is sent to the slice")


def plan(tpu: Tpu) -> list[tuple[str, Command]]:
    """What a run tells gcloud, in order, with the reason; nothing is done."""
    there = Slice(tpu)
    home = _home(_pack())
    asked = [("wait until it is ACTIVE", there.describe_request())] if tpu.queued else []
    kept = [] if tpu.keep else [("delete it", there.delete())]
    return [
        ("is there a slice of this name?", there.describe()),
        ("make it", there.create()),
        *asked,
        ("wait until it is READY", there.describe()),
        ("send the code to every worker", there.copy(Path("kiln.tgz"), f"{home}.tgz")),
        ("set every worker up", there.ssh(_set_up(home))),
        ("send the job", there.copy(Path("job.json"), f"{home}/job.json")),
        ("train on every worker; the first one's log comes back", there.ssh(_train(home, tpu))),
        *kept,
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
    """As process.run_job, on a slice. Training goes on from its checkpoints on a new one when the
    slice is taken away.

    Raises:
        NoSlice: it cannot be made, or has been taken away too often.
    """
    vae = None if job.vae is None else _in_store(store, job.vae)
    job = replace(job, model=_in_store(store, job.model), vae=vae)
    run = _Run(Slice(tpu), job, on_event, grace_seconds, poll_seconds)
    try:
        return run.to_the_end(tpu.restarts)
    finally:
        if run.made and not tpu.keep:
            run.delete()


class _Run:
    def __init__(
        self,
        there: Slice,
        job: TrainJob,
        on_event: Callable[[Event], None],
        grace_seconds: float,
        poll_seconds: float,
    ) -> None:
        self._slice, self._job, self._on_event = there, job, on_event
        self._grace, self._poll = grace_seconds, poll_seconds
        self.made = False  # by us, and so ours to delete
        self._code = _pack()
        self._home = _home(self._code)

    def to_the_end(self, restarts: int) -> Event:
        """Train, on one slice after another if need be."""
        for left in range(restarts, -1, -1):
            self._make()
            try:
                self._send()
                return self._train()
            except (JobFailed, OSError, TransientError, subprocess.CalledProcessError) as error:
                state = self._state_in_the_end()
                if state == "READY":
                    if isinstance(error, JobFailed) and error.code == SSH_LOST:
                        log.warning("tpu: the connection was lost; %d more tries", left)
                        continue
                    if isinstance(error, subprocess.CalledProcessError):
                        raise NoSlice(f"the slice cannot be set up: {_words(error)}") from None
                    raise  # the job's own fault: no new slice mends it
                log.warning("tpu: the slice is %s; %d more may be made", state or "gone", left)
                self.delete()
        raise NoSlice("the slice was taken away too often: raise tpu.restarts, or run again")

    def delete(self) -> None:
        """Delete the slice; one that is not there is as good."""
        with suppress(subprocess.CalledProcessError):
            _tell(self._slice.delete())

    def _make(self) -> None:
        """Have the slice ready: the one that is there, or a new one."""
        state, request = self._state(), self._request()
        if state in GONE or request in REFUSED:
            self.delete()
            state = request = None
        if state is None and request is None:
            log.info("tpu: making %s", self._slice.tpu.name)
            self.made = True
            try:
                _tell(self._slice.create())
            except subprocess.CalledProcessError as error:
                raise NoSlice(f"gcloud did not make the slice: {_words(error)}") from None
        self._wait()

    def _wait(self) -> None:
        """Until it is ready."""
        while (state := self._state()) != "READY":
            request = self._request()
            if request in REFUSED:
                raise NoSlice(f"the request for the slice is {request}")
            if state not in COMING and request is None:
                raise NoSlice(f"the slice is {state or 'not there'}, and nothing is asked for")
            log.info("tpu: waiting, the slice is %s", state or request)
            time.sleep(self._poll)

    def _state_in_the_end(self) -> str | None:
        """What has become of the slice: that it is taken away is said a little later."""
        for _ in range(LATER):
            if (state := self._state()) != "READY":
                return state
            time.sleep(self._poll)
        return "READY"

    def _state(self) -> str | None:
        return _answer(self._slice.describe())

    def _request(self) -> str | None:
        """The state of the request for the slice, if it is queued for."""
        if not self._slice.tpu.queued:
            return None
        return _answer(self._slice.describe_request())

    def _send(self) -> None:
        """Bring code, environment and job to every worker."""
        with tempfile.TemporaryDirectory(prefix="kiln-tpu-") as folder:
            code, job = Path(folder, "kiln.tgz"), Path(folder, "job.json")
            code.write_bytes(self._code)
            write_job(self._job, job)
            log.info("tpu: setting up (minutes, once a slice)")
            _tell(self._slice.copy(code, f"{self._home}.tgz"))
            _tell(self._slice.ssh(_set_up(self._home)))
            _tell(self._slice.copy(job, f"{self._home}/job.json"))

    def _train(self) -> Event:
        child = subprocess.Popen(
            self._slice.ssh(_train(self._home, self._slice.tpu)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        heard = Heard(self._on_event)
        pumps = (lambda: heard.mixed(child.stdout),)
        return attend(child, heard, pumps, lambda: self._stop(child))

    def _stop(self, child: subprocess.Popen[str]) -> None:
        """Have every worker checkpoint and end."""
        log.info("tpu: stopping (it has %g s to checkpoint)", self._grace)
        with suppress(subprocess.CalledProcessError):
            _tell(self._slice.ssh(_signal(self._home, signal.SIGTERM)))
        try:
            child.wait(self._grace)
        except BaseException:
            with suppress(subprocess.CalledProcessError):
                _tell(self._slice.ssh(_signal(self._home, signal.SIGKILL)))
            child.kill()
            child.wait()


def _set_up(home: str) -> str:
    return f"mkdir -p {home} && tar -xzf {home}.tgz -C {home} && bash {home}/deploy/tpu/setup.sh"


def _train(home: str, tpu: Tpu) -> str:
    flags = f"LIBTPU_INIT_ARGS={shlex.quote(tpu.libtpu_args)} " if tpu.libtpu_args else ""
    return f"{flags}bash {home}/deploy/tpu/worker.sh {home}/job.json"


def _signal(home: str, number: signal.Signals) -> str:
    return f"pkill --signal {number.name} -f 'runtimes .*/{home}/job[.]json' || true"


def _pack() -> bytes:
    """The code that is sent, as a tar file: the same bytes for the same code."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as tar:
        for path in sorted(p for name in SENT for p in _files(ROOT / name)):
            member = tarfile.TarInfo(str(path.relative_to(ROOT)))
            data = path.read_bytes()
            member.size, member.mode = len(data), path.stat().st_mode & 0o777
            tar.addfile(member, io.BytesIO(data))
    return _without_clock(buffer.getvalue())


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts]


def _without_clock(packed: bytes) -> bytes:
    """A gzip file whose header does not say when it was made (RFC 1952, MTIME)."""
    return packed[:4] + bytes(4) + packed[8:]


def _home(code: bytes) -> str:
    """The folder of this code on a worker, below its home."""
    return f"kiln-{hashlib.sha256(code).hexdigest()[:12]}"


def _in_store(store: Store, folder: str) -> str:
    """URL of a model's folder in the store, copied there if it is not: a slice reads nothing of
    this machine."""
    path = f"models/{digest_model(Path(folder))}"
    url, done = store.url_of(path), f"{store.root}/{path}.json"
    if not store.fs.exists(done):
        log.info("tpu: copying %s to the store", folder)
        store.fs.put(f"{folder.rstrip('/')}/", f"{store.root}/{path}/", recursive=True)
        store.fs.pipe_file(done, b"{}")  # last: the copy is whole
    return url


def _tell(command: Command) -> str:
    """Run a command; its output. Raises CalledProcessError."""
    log.debug("%s", shlex.join(command))
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=COMMAND_SECONDS,
        env={**os.environ, "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"},  # nobody would see one
    )
    return done.stdout.strip()


def _answer(command: Command) -> str | None:
    """What a `describe` says; None if there is no such thing."""
    try:
        return _tell(command) or None
    except subprocess.CalledProcessError as error:
        if "NOT_FOUND" in error.stderr or "not found" in error.stderr.lower():
            return None
        raise NoSlice(f"gcloud does not answer: {_words(error)}") from None


def _words(error: subprocess.CalledProcessError) -> str:
    return " ".join((error.stderr or error.stdout or "").split())[-500:]
