"""Training on a slice: the gcloud commands."""

import hashlib
import io
import re
import signal
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from artifacts.lock import LockLost
from artifacts.store import Store
from configs.load_and_extend_recipe import RecipeError, load_recipe
from configs.settings.holdout_divergence_profile_wandb import Wandb
from configs.settings.tpu import Tpu
from configs.settings.train import Train
from runtimes.contract import WrongInput
from runtimes.process.job import TrainJob
from runtimes.spmd.tpu_slices import parse_accelerator_type
from tasks.build_or_reuse import StorageAway, TransientError
from tasks.child_process import JobFailed
from tasks.tpu import launch
from tasks.tpu.commands import Slice
from tasks.tpu.pack_code import pack_code
from tasks.tpu.run_gcloud import SliceUnavailable

OWNER = hashlib.sha256(b"gs://bucket/run").hexdigest()[:20]  # of Cloud.job
SLICE: dict[str, Any] = {"name": "kiln", "zone": "us-east5-a", "accelerator_type": "v5p-16"}


def test_the_commands_have_the_recipes_settings() -> None:
    tpu = Tpu(**SLICE, project="mine", capacity="spot", queued=True, service_account="a@b")
    there = Slice(tpu, "a-run")
    assert " ".join(there.create()) == (
        "gcloud compute tpus queued-resources create kiln --zone=us-east5-a --project=mine "
        "--accelerator-type=v5p-16 --runtime-version=v2-alpha-tpuv5 --node-id=kiln --spot "
        "--labels=kiln_run=a-run --service-account=a@b"
    )
    assert " ".join(there.delete()) == (
        "gcloud compute tpus queued-resources delete kiln --zone=us-east5-a --project=mine "
        "--force --quiet"
    )
    reserved = Slice(Tpu(**SLICE, capacity="reserved"), "a-run")
    assert " ".join(reserved.create()) == (
        "gcloud compute tpus tpu-vm create kiln --zone=us-east5-a --accelerator-type=v5p-16 "
        "--version=v2-alpha-tpuv5 --reserved --labels=kiln_run=a-run"
    )
    assert reserved.describe()[-1] == "--format=value(state,labels.kiln_run)"
    assert not [one for one in Slice(Tpu(**SLICE, keep=True), "a-run").create() if "label" in one]
    assert reserved.ssh("ls")[-1] == "--command=ls" and "--worker=all" in reserved.ssh("ls")
    for command, flag in ((reserved.ssh("ls"), "ssh"), (reserved.copy(Path("a"), "b"), "scp")):
        assert f"--{flag}-flag=-oServerAliveInterval=30" in command
    assert reserved.copy(Path("job.json"), "home/job.json")[-2:] == [
        "kiln:home/job.json",
        "--worker=all",
    ]


def test_the_packed_code_is_complete_and_deterministic() -> None:
    packed = pack_code()
    assert packed == pack_code()
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        names = tar.getnames()
    assert {"deploy/tpu/worker.sh", "runtimes/__main__.py", "requirements/xla.txt"} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "flows", "tasks"))]


def test_a_slice_gets_no_file_of_variables_from_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("deploy/tpu/setup.sh", "deploy/server/.env", "deploy/worker.env"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("S3_SECRET=secret")
    monkeypatch.setattr("tasks.tpu.pack_code.CHECKOUT", tmp_path)
    with tarfile.open(fileobj=io.BytesIO(pack_code())) as tar:
        assert tar.getnames() == ["deploy/tpu/setup.sh"]


def test_a_slice_gets_the_files_of_a_linked_folder(tmp_path: Path) -> None:
    shared, model = tmp_path / "shared", tmp_path / "model"
    for folder in (shared, model):
        folder.mkdir()
    (shared / "config.json").write_text("{}")
    (model / "vae").symlink_to(shared)
    copy = launch._in_store(Store(str(tmp_path / "store")), str(model))
    assert Path(copy, "vae/config.json").read_text() == "{}"


def verbs(**settings: Any) -> list[str]:
    """The verbs of the gcloud commands, in order; for a shell command, its script."""
    commands = [command for _, command in launch.list_commands(Tpu(**SLICE, **settings))]
    scripts = [re.findall(r"deploy/tpu/(\w+)\.sh", command[-1]) for command in commands]
    return [
        " ".join([command[4], *script]) for command, script in zip(commands, scripts, strict=True)
    ]


def test_the_commands_are_in_the_order_of_a_run() -> None:
    made = ["describe", "create", "describe", "scp", "ssh setup", "scp", "ssh worker"]
    assert verbs() == [*made, "delete"]
    assert verbs(keep=True) == made


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
def slice_run(monkeypatch: pytest.MonkeyPatch) -> launch._SliceRun:
    monkeypatch.setattr(launch, "write_job", lambda job, path: None)
    monkeypatch.setattr(launch._SliceRun, "_train", lambda run: {"event": "result"})
    job: Any = None
    there = Slice(Tpu(**SLICE), "a-run")
    return launch._SliceRun(there, job, lambda event: None, 0.0, 0.0, code=b"")


def test_a_slice_that_is_taken_away_while_scp_hangs_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, slice_run: launch._SliceRun
) -> None:
    cloud = HangingCloud(monkeypatch, "scp")
    assert slice_run.train_with_restarts(1) == {"event": "result"}
    assert cloud.told.count("create") == 2


def test_a_slice_that_is_taken_away_before_it_is_ready_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, slice_run: launch._SliceRun
) -> None:
    """Else it takes one of the task's few tries; a run of days on spot chips meets many."""
    cloud = HangingCloud(monkeypatch)
    states = iter([None, "CREATING", "PREEMPTED", None])
    monkeypatch.setattr(slice_run, "_state", lambda: next(states, cloud.state))
    assert slice_run.train_with_restarts(1) == {"event": "result"}
    assert [verb for verb in cloud.told if verb in ("create", "delete")] == [
        *("create", "delete", "create"),
    ]
    states = iter([None, "PREEMPTED"])
    with pytest.raises(TransientError, match="too often"):
        slice_run.train_with_restarts(0)


def test_a_signal_that_hangs_does_not_keep_the_connection(
    monkeypatch: pytest.MonkeyPatch, slice_run: launch._SliceRun
) -> None:
    cloud = HangingCloud(monkeypatch, "ssh", "ssh")
    with subprocess.Popen(["sleep", "600"], text=True) as connection:
        slice_run._stop(connection)
    assert connection.returncode == -signal.SIGKILL
    assert cloud.told == ["ssh", "ssh"] and max(cloud.seconds) <= 60


def test_a_deletion_that_hangs_is_logged_and_hides_no_error(
    monkeypatch: pytest.MonkeyPatch, slice_run: launch._SliceRun, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launch, "OUTAGE_SECONDS", -1.0)
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
        monkeypatch.setattr(launch, "run_command", self.run)
        monkeypatch.setattr("tasks.tpu.run_gcloud.run_command", self.run)
        monkeypatch.setattr(launch, "check_held", self.check_held)
        monkeypatch.setattr(launch._SliceRun, "_train", self.train)
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
        return launch.run_on_slice(*given, store=self.store, poll_seconds=0.0)


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cloud:
    return Cloud(monkeypatch, tmp_path)


def test_an_outage_during_the_deletion_is_waited_for(cloud: Cloud) -> None:
    cloud.fails = ["delete"] * 3
    assert cloud.attempt() == {"event": "result"} and not cloud.state


def test_a_slice_that_could_not_be_deleted_is_used_and_deleted_by_the_retry(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "OUTAGE_SECONDS", -1.0)
    cloud.fails = ["delete"]
    cloud.trains = [StorageAway("the bucket is away")]
    with pytest.raises(StorageAway):
        cloud.attempt()
    assert cloud.state == "READY"
    cloud.attempt()
    assert "create" not in cloud.told and cloud.told[-1] == "delete" and not cloud.state


def test_a_request_that_could_not_be_deleted_is_deleted_by_the_retry(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "OUTAGE_SECONDS", -1.0)
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
    with pytest.raises((SliceUnavailable, KeyboardInterrupt)):
        cloud.attempt()
    assert cloud.told[-1] == "delete" and not cloud.state


@pytest.mark.parametrize(
    ("failure", "outage"),
    [
        (JobFailed("ssh is lost", launch.SSH_LOST), 4),
        (TransientError("stopped, since another worker's connection is lost"), 0),
    ],
)
def test_a_lost_connection_or_an_outage_gives_no_slice_up(
    cloud: Cloud, failure: Exception, outage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(run: launch._SliceRun) -> dict[str, str]:
        cloud.fails += ["describe"] * outage
        monkeypatch.setattr(launch._SliceRun, "_train", cloud.train)
        raise failure

    monkeypatch.setattr(launch._SliceRun, "_train", lost)
    assert cloud.attempt() == {"event": "result"}
    assert cloud.told.count("create") == cloud.told.count("delete") == 1 and not cloud.fails


def test_a_cloud_that_never_answered_is_not_waited_for(cloud: Cloud) -> None:
    cloud.fails = ["describe"]
    with pytest.raises(SliceUnavailable, match="does not answer"):
        cloud.attempt()
    assert cloud.told == ["describe"]


def test_a_run_that_lost_its_lock_leaves_the_slice_to_its_successor(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lost(run: launch._SliceRun) -> None:
        cloud.lock_is_lost = True
        raise JobFailed("ssh is lost", launch.SSH_LOST)

    monkeypatch.setattr(launch._SliceRun, "_train", lost)
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
    slice_run: launch._SliceRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*, ask: bool) -> None:
        raise LockLost("another process builds the artifact")

    monkeypatch.undo()
    monkeypatch.setattr(launch, "check_held", lost)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(LockLost):
        slice_run._train()


def test_a_signal_to_the_job_of_one_attempt_reaches_no_other(slice_run: launch._SliceRun) -> None:
    other = launch._SliceRun(slice_run.slice, slice_run.job, print, 0.0, 0.0, code=b"")
    assert slice_run.job_file != other.job_file


def test_a_slice_of_another_training_is_refused_and_stays(cloud: Cloud) -> None:
    cloud.state, cloud.owner = "READY", "another"
    with pytest.raises(SliceUnavailable, match=r"of another training.*tpu-vm delete kiln"):
        cloud.attempt()
    assert cloud.told == ["describe"]


def test_a_slice_that_another_run_made_after_a_preemption_stays(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    def preempted(run: launch._SliceRun) -> None:
        cloud.owner = "another"
        raise JobFailed("ssh is lost", launch.SSH_LOST)

    monkeypatch.setattr(launch._SliceRun, "_train", preempted)
    with pytest.raises(SliceUnavailable, match="of another training"):
        cloud.attempt()
    assert "delete" not in cloud.told


def test_a_request_of_another_training_stays(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    def preempted(run: launch._SliceRun) -> None:
        cloud.owner, cloud.state = "another", ""
        raise JobFailed("ssh is lost", launch.SSH_LOST)

    cloud.state, cloud.request, cloud.owner = "READY", "ACTIVE", OWNER
    monkeypatch.setattr(launch._SliceRun, "_train", preempted)
    with pytest.raises(SliceUnavailable, match="of another training"):
        cloud.attempt(queued=True)
    assert "delete" not in cloud.told


def test_a_slice_that_somebody_else_creates_first_stays(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exists(command: list[str], seconds: float = 0) -> str:
        if command[4] == "create":
            raise subprocess.CalledProcessError(1, command, "", "ALREADY_EXISTS: the slice")
        return cloud.run(command)

    monkeypatch.setattr(launch, "run_command", exists)
    with pytest.raises(SliceUnavailable, match="did not create"):
        cloud.attempt()
    assert "delete" not in cloud.told


def test_a_run_that_loses_its_lock_in_an_outage_deletes_nothing(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store was away, too: the lock is known to be lost when the cloud answers again."""

    def preempted(run: launch._SliceRun) -> None:
        monkeypatch.setattr(launch._SliceRun, "_settled_state", settled)
        raise JobFailed("ssh is lost", launch.SSH_LOST)

    def settled(run: launch._SliceRun) -> str:
        cloud.lock_is_lost = True
        return "CREATING"  # the successor's

    monkeypatch.setattr(launch._SliceRun, "_train", preempted)
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


@pytest.mark.parametrize(
    ("kind", "software"),
    [
        ("v4-32", "tpu-ubuntu2204-base"),
        ("v5litepod-8", "v2-alpha-tpuv5-lite"),
        ("v5p-8", "v2-alpha-tpuv5"),
        ("v6e-16", "v2-alpha-tpuv6e"),
    ],
)
def test_a_slice_has_the_software_of_its_kind(kind: str, software: str) -> None:
    """As Cloud TPU's page "TPU software versions" lists them."""
    for queued, option in ((False, "--version"), (True, "--runtime-version")):
        tpu = Tpu(**{**SLICE, "accelerator_type": kind}, queued=queued)
        assert f"{option}={software}" in Slice(tpu, "a-run").create()


def test_software_of_its_own_is_kept() -> None:
    for kind in ("v6e-16", "v9-8"):
        tpu = Tpu(**{**SLICE, "accelerator_type": kind}, version="nightly")
        assert "--version=nightly" in Slice(tpu, "a-run").create()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"accelerator_type": "v6e-16", "version": "v2-alpha-tpuv5"}, "null (v2-alpha-tpuv6e)"),
        ({"accelerator_type": "v5p-8", "version": "v2-alpha-tpuv5-lite"}, "null (v2-alpha-tpuv5)"),
        ({"accelerator_type": "v5e-8"}, "gcloud calls it v5litepod-8"),
        ({"accelerator_type": "v9-8"}, "set version too"),
    ],
)
def test_unsupported_software_is_refused_before_gcloud(
    settings: dict[str, str], words: str
) -> None:
    overrides = {f"tpu.{name}": value for name, value in {**SLICE, **settings}.items()}
    with pytest.raises(RecipeError) as refused:
        load_recipe("sd2-v5p", overrides)
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("accelerator_type", "settings", "words"),
    [
        ("v5p-64", {"global_batch_size": 10}, "10 is not divisible by the 8 hosts of v5p-64"),
        ("v5p-64", {"global_batch_size": 48}, "6 samples of a host .* its 4 devices"),
        ("v5p-64", {"micro_batch_size": 6}, "6 samples of a host cannot be shared"),
        ("v5p-64", {"global_batch_size": 80, "micro_batch_size": 8}, "2 samples of a host"),
        ("v5p-64", {"fsdp": 5}, "train.fsdp 5 does not divide 32 devices"),
        ("v5p-9", {}, "topology v5p-9: no such slice .known: v5p-8, "),
        ("v5litepod-12", {}, "topology v5litepod-12: no such slice"),
        ("v5litepod-16", {"fsdp": 3}, "train.fsdp 3 does not divide 16 devices"),
        ("v5p-384", {"global_batch_size": 64}, "the 48 hosts of v5p-384"),
    ],
)
def test_a_batch_or_shards_that_the_slice_cannot_share_are_refused_before_it_is_paid(
    accelerator_type: str, settings: dict[str, Any], words: str
) -> None:
    tpu = Tpu(**{**SLICE, "accelerator_type": accelerator_type})
    with pytest.raises(WrongInput, match=words):
        launch.check(tpu, "gs://bucket/store", Train(**{"global_batch_size": 96, **settings}))


@pytest.mark.parametrize(("name", "chips"), [("v5p-384", 192), ("v5p-2048", 1024), ("v2-8", None)])
def test_accelerator_types_without_a_plan_are_known_by_their_size(
    name: str, chips: int | None
) -> None:
    found = parse_accelerator_type(name)
    assert (found and (found.chips, found.hosts)) == (chips and (chips, chips // 4))


def test_a_store_that_a_slice_cannot_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gcloud").write_text("")
    (tmp_path / "gcloud").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    settings, wandb = Train(global_batch_size=8), Wandb(project="p")
    with pytest.raises(WrongInput, match="make it a gs:// URL"):
        launch.check(Tpu(**SLICE), "store", settings)
    with pytest.raises(WrongInput, match="mode offline"):
        launch.check(
            Tpu(**SLICE), "gs://bucket/store", settings.model_copy(update={"wandb": wandb})
        )
    launch.check(Tpu(**SLICE), "gs://bucket/store", settings)
    (tmp_path / "gcloud").unlink()
    with pytest.raises(WrongInput, match="gcloud is not installed"):
        launch.check(Tpu(**SLICE), "gs://bucket/store", settings)
    with pytest.raises(RecipeError, match="tpu requires runtime xla"):
        load_recipe("digits", {f"tpu.{name}": value for name, value in SLICE.items()})
