"""Training on a slice of the cloud: it is made, used again and deleted, whatever fails."""

import hashlib
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from artifacts.lock import LockLost
from artifacts.store import Store
from configs.errors import Away
from configs.settings.recipe import Tpu
from runtimes.process.job import TrainJob
from tasks import tpu as gcloud
from tasks.child_process import JobFailed, JobStopped
from tasks.tpu import Slice

OWNER = hashlib.sha256(b"gs://bucket/run").hexdigest()[:20]  # of Cloud.job
SLICE: dict[str, Any] = {"name": "kiln", "zone": "us-east5-a", "accelerator_type": "v5p-16"}


class HangingCloud:
    """Stands in for `subprocess.run` of gcloud: a slice whose commands in `hangs` do not end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *hangs: str) -> None:
        self.hangs, self.state = [*hangs], ""
        self.told: list[str] = []
        self.seconds: list[float] = []
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(
        self, command: list[str], *, timeout: float, **_: Any
    ) -> subprocess.CompletedProcess[str]:
        verb = command[4]
        self.told.append(verb)
        self.seconds.append(timeout)
        if verb in self.hangs:
            self.hangs.remove(verb)
            self.state = "PREEMPTED"
            raise subprocess.TimeoutExpired(command, timeout)
        if verb == "describe" and not self.state:
            raise subprocess.CalledProcessError(1, command, "", "NOT_FOUND")
        if verb in ("create", "delete"):
            self.state = "READY" if verb == "create" else ""
        return subprocess.CompletedProcess(command, 0, self.state, "")


@pytest.fixture
def slice_run(monkeypatch: pytest.MonkeyPatch) -> gcloud._SliceRun:
    monkeypatch.setattr(gcloud, "write_job", lambda job, path: None)
    monkeypatch.setattr(gcloud._SliceRun, "_train", lambda run: {"event": "result"})
    job: Any = None
    there = Slice(Tpu(**SLICE), "a-run")
    return gcloud._SliceRun(there, job, lambda event: None, 0.0, 0.0, code=b"")


def test_a_slice_that_is_taken_away_while_scp_hangs_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, slice_run: gcloud._SliceRun
) -> None:
    cloud = HangingCloud(monkeypatch, "scp")
    assert slice_run.train_with_restarts(1) == {"event": "result"}
    assert cloud.told.count("create") == 2


def test_a_slice_that_is_taken_away_before_it_is_ready_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, slice_run: gcloud._SliceRun
) -> None:
    """Else it takes one of the task's few tries; a run of days on spot chips meets many."""
    cloud = HangingCloud(monkeypatch)
    states = iter([None, "CREATING", "PREEMPTED", None])
    monkeypatch.setattr(slice_run, "_state", lambda: next(states, cloud.state))
    assert slice_run.train_with_restarts(1) == {"event": "result"}
    assert [verb for verb in cloud.told if verb in ("create", "delete")] == [
        *("create", "delete", "create")
    ]
    states = iter([None, "PREEMPTED"])
    with pytest.raises(Away, match="too often"):
        slice_run.train_with_restarts(0)


def test_a_signal_that_hangs_does_not_keep_the_connection(
    monkeypatch: pytest.MonkeyPatch, slice_run: gcloud._SliceRun
) -> None:
    cloud = HangingCloud(monkeypatch, "ssh", "ssh")
    with subprocess.Popen(["sleep", "600"], text=True) as connection:
        slice_run._stop(connection)
    assert connection.returncode == -signal.SIGKILL
    assert cloud.told == ["ssh", "ssh"] and max(cloud.seconds) <= 60


def test_a_deletion_that_hangs_is_logged_and_hides_no_error(
    monkeypatch: pytest.MonkeyPatch, slice_run: gcloud._SliceRun, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gcloud, "OUTAGE_SECONDS", -1.0)
    HangingCloud(monkeypatch, "delete")
    slice_run.delete()
    assert "kiln may remain and cost money" in caplog.text


class Cloud:
    """Stands in for gcloud: one slice with its label. `fails` are verbs that fail once each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.told, self.fails = list[str](), list[str]()
        self.state, self.request, self.owner = "", "", ""
        self.interrupted = ""  # verb after which the run is interrupted, once
        self.lock_is_lost = False
        self.trains: list[BaseException] = []  # errors of the first trainings
        monkeypatch.setattr(gcloud, "run_command", self.run)
        monkeypatch.setattr("tasks.tpu.run_command", self.run)
        monkeypatch.setattr(gcloud, "check_held", self.check_held)
        monkeypatch.setattr(gcloud._SliceRun, "_train", self.train)
        self.store = Store(str(tmp_path / "store"))
        place = str(tmp_path)
        self.job = TrainJob("xla", place, "", {}, work="gs://bucket/run", out=place)
        (tmp_path / "model_index.json").write_text("{}")

    def run(self, command: list[str], seconds: float = 0) -> str:
        kind, verb = command[3:5]
        self.told.append(verb)
        assert len(self.told) < 1000, "it waits for a request that nobody fulfils"
        if verb == "create":
            labels = [one for one in command if one.startswith("--labels=")]
            self.owner = labels[0].rpartition("=")[2] if labels else ""
            if kind == "queued-resources":
                self.request = "WAITING_FOR_RESOURCES"
            else:
                self.state = "READY"
        if verb == self.interrupted:
            self.interrupted = ""
            raise KeyboardInterrupt
        if verb in self.fails:
            self.fails.remove(verb)
            raise subprocess.CalledProcessError(1, command, "", "Unable to reach the API")
        state = self.request if kind == "queued-resources" else self.state
        if verb == "describe" and not state:
            raise subprocess.CalledProcessError(1, command, "", "NOT_FOUND")
        if verb == "delete":
            self.state = self.request = ""
        return f"{state}\t{self.owner}".strip()

    def train(self) -> dict[str, str]:
        if self.trains:
            raise self.trains.pop(0)
        return {"event": "result"}

    def check_held(self, *, ask: bool) -> None:
        if self.lock_is_lost:
            raise LockLost("another process builds the artifact")

    def attempt(self, **tpu: Any) -> Any:
        self.told.clear()
        given = (Tpu(**SLICE, **tpu), self.job, lambda event: None)
        return gcloud.run_on_slice(*given, store=self.store, poll_seconds=0.0)


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cloud:
    return Cloud(monkeypatch, tmp_path)


def test_an_outage_during_the_deletion_is_waited_for(cloud: Cloud) -> None:
    cloud.fails = ["delete"] * 3
    assert cloud.attempt() == {"event": "result"} and not cloud.state


def test_a_slice_that_could_not_be_deleted_is_used_and_deleted_by_the_retry(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcloud, "OUTAGE_SECONDS", -1.0)
    cloud.fails = ["delete"]
    cloud.trains = [Away("the bucket is away")]
    with pytest.raises(Away):
        cloud.attempt()
    assert cloud.state == "READY"
    cloud.attempt()
    assert "create" not in cloud.told and cloud.told[-1] == "delete" and not cloud.state


def test_a_request_that_could_not_be_deleted_is_deleted_by_the_retry(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcloud, "OUTAGE_SECONDS", -1.0)
    cloud.interrupted, cloud.fails = "create", ["delete"]
    with pytest.raises(KeyboardInterrupt):
        cloud.attempt(queued=True)
    assert cloud.request
    cloud.interrupted = "scp"
    cloud.state = "READY"
    with pytest.raises(KeyboardInterrupt):
        cloud.attempt(queued=True)
    assert "create" not in cloud.told and cloud.told[-1] == "delete" and not cloud.request


@pytest.mark.parametrize("end", ["fails", "interrupted"])
def test_a_slice_whose_creation_does_not_end_is_deleted(cloud: Cloud, end: str) -> None:
    if end == "fails":
        cloud.fails = ["create"]
    else:
        cloud.interrupted = "create"
    with pytest.raises((Away, KeyboardInterrupt)):
        cloud.attempt()
    assert cloud.told[-1] == "delete" and not cloud.state


@pytest.mark.parametrize(
    ("failure", "outage"),
    [
        (JobFailed("ssh is lost", gcloud.SSH_LOST), 4),
        (JobStopped("stopped, since another worker's connection is lost"), 0),
    ],
)
def test_a_lost_connection_or_an_outage_gives_no_slice_up(
    cloud: Cloud, failure: Exception, outage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(run: gcloud._SliceRun) -> dict[str, str]:
        cloud.fails += ["describe"] * outage
        monkeypatch.setattr(gcloud._SliceRun, "_train", cloud.train)
        raise failure

    monkeypatch.setattr(gcloud._SliceRun, "_train", lost)
    assert cloud.attempt() == {"event": "result"}
    assert cloud.told.count("create") == cloud.told.count("delete") == 1 and not cloud.fails


def test_a_cloud_that_never_answered_is_not_waited_for(cloud: Cloud) -> None:
    cloud.fails = ["describe"]
    with pytest.raises(Away, match="does not answer"):
        cloud.attempt()
    assert cloud.told == ["describe"]


def test_a_run_that_lost_its_lock_leaves_the_slice_to_its_successor(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lost(run: gcloud._SliceRun) -> None:
        cloud.lock_is_lost = True
        raise JobFailed("ssh is lost", gcloud.SSH_LOST)

    monkeypatch.setattr(gcloud._SliceRun, "_train", lost)
    with pytest.raises(LockLost):
        cloud.attempt()
    assert "delete" not in cloud.told and "tpu-vm delete kiln" in caplog.text
    with pytest.raises(LockLost):  # it creates none
        cloud.attempt()
    cloud.state = ""
    with pytest.raises(LockLost):
        cloud.attempt()
    assert cloud.told == ["describe"]


def test_a_run_that_loses_its_lock_during_the_set_up_does_not_train(
    slice_run: gcloud._SliceRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*, ask: bool) -> None:
        raise LockLost("another process builds the artifact")

    monkeypatch.undo()
    monkeypatch.setattr(gcloud, "check_held", lost)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(LockLost):
        slice_run._train()


def test_a_signal_to_the_job_of_one_attempt_reaches_no_other(slice_run: gcloud._SliceRun) -> None:
    other = gcloud._SliceRun(slice_run.slice, slice_run.job, print, 0.0, 0.0, code=b"")
    assert slice_run.job_file != other.job_file


def test_a_slice_of_another_training_is_refused_and_stays(cloud: Cloud) -> None:
    cloud.state, cloud.owner = "READY", "another"
    with pytest.raises(Away, match=r"of another training.*tpu-vm delete kiln"):
        cloud.attempt()
    assert cloud.told == ["describe"]


@pytest.mark.parametrize("queued", [False, True], ids=["slice", "request"])
def test_what_another_run_made_after_a_preemption_stays(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, queued: bool
) -> None:
    def preempted(run: gcloud._SliceRun) -> None:
        cloud.owner, cloud.state = "another", "" if queued else cloud.state
        raise JobFailed("ssh is lost", gcloud.SSH_LOST)

    if queued:
        cloud.state, cloud.request, cloud.owner = "READY", "ACTIVE", OWNER
    monkeypatch.setattr(gcloud._SliceRun, "_train", preempted)
    with pytest.raises(Away, match="of another training"):
        cloud.attempt(queued=queued)
    assert "delete" not in cloud.told


def test_a_slice_that_somebody_else_creates_first_stays(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exists(command: list[str], seconds: float = 0) -> str:
        if command[4] == "create":
            raise subprocess.CalledProcessError(1, command, "", "ALREADY_EXISTS: the slice")
        return cloud.run(command)

    monkeypatch.setattr(gcloud, "run_command", exists)
    with pytest.raises(Away, match="did not create"):
        cloud.attempt()
    assert "delete" not in cloud.told


def test_a_run_that_loses_its_lock_in_an_outage_deletes_nothing(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store was away, too: the lock is known to be lost when the cloud answers again."""

    def preempted(run: gcloud._SliceRun) -> None:
        monkeypatch.setattr(gcloud._SliceRun, "_settled_state", settled)
        raise JobFailed("ssh is lost", gcloud.SSH_LOST)

    def settled(run: gcloud._SliceRun) -> str:
        cloud.lock_is_lost = True
        return "CREATING"  # the successor's

    monkeypatch.setattr(gcloud._SliceRun, "_train", preempted)
    with pytest.raises(LockLost):
        cloud.attempt()
    assert "delete" not in cloud.told


@pytest.mark.parametrize("is_there", [True, False])
def test_a_slice_that_was_there_or_is_kept_stays(cloud: Cloud, is_there: bool) -> None:
    cloud.state = "READY" if is_there else ""
    cloud.attempt(keep=not is_there)
    assert cloud.state == "READY" and ("create" in cloud.told) != is_there
    cloud.attempt()
    assert cloud.state == "READY", "it has no label"
