"""Training on a slice of the cloud: it is made, used again and deleted, whatever fails."""

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from artifacts.lock import LockLost
from artifacts.store import Store
from configs.errors import Away
from configs.settings.clusters import Tpu
from runtimes.process.job import TrainJob
from tasks.child_process import JobFailed
from tasks.hosts import attempts, gcloud
from tasks.hosts.engine import Agents
from tasks.hosts.gcloud import GcloudEngine, Slice

OWNER = "a-run"
SLICE: dict[str, Any] = {"name": "kiln", "zone": "us-east5-a", "accelerator_type": "v5p-8"}
AGENTS = Agents(1, "gs://bucket/run/jobs/1.json", 0.0, "python")
Events = list[dict[str, Any]]
#: Stands in for an agent: it starts a rank, and prints its number.
RANK = """
import os, subprocess
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
os.write(1, b"%d\\n" % child.pid)
child.wait()
"""
#: What the agent says in a training: the connection is cut, an agent is stopped, or it ends well.
CUT: Events = [{"event": "host", "name": "w-0"}]
STOPPED: Events = [*CUT, {"event": "exit", "code": 143}]
AWAY: Events = [
    {"event": "error", "message": "the bucket", "away": True},
    {"event": "exit", "code": 1},
]
RESULT: Events = [{"event": "result"}, {"event": "exit", "code": 0}]


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
def engine() -> GcloudEngine:
    return GcloudEngine(Slice(Tpu(**SLICE), OWNER), "xla", poll_seconds=0.0, code=b"")


class Connections:
    """Stands in for the ssh of gcloud: what the agents say in each training, then RESULT."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.trains: list[Events | BaseException] = []
        self._file = folder / "said"
        self._popen = subprocess.Popen
        monkeypatch.setattr(subprocess, "Popen", self.open)

    def open(self, command: list[str], **options: Any) -> Any:
        said = self.trains.pop(0) if self.trains else RESULT
        if isinstance(said, BaseException):
            raise said
        lines = [json.dumps({"host": 0, **event}) for event in said]
        self._file.write_text("".join(f"{line}\n" for line in lines))
        return self._popen(["cat", str(self._file)], **options)


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Connections:
    return Connections(monkeypatch, tmp_path)


def train(engine: GcloudEngine, folder: Path, restarts: int = 20) -> Any:
    """Run a job on the engine's slice, with all retries."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "model_index.json").write_text("{}")
    work = str(folder / "run")
    job = TrainJob("xla", str(model), "", {}, work=work, out=work)
    return attempts.run_on_hosts(
        engine,
        job,
        lambda event: None,
        agents=AGENTS,
        store=Store(str(folder / "store")),
        cluster=engine.slice.tpu.model_copy(update={"restarts": restarts}),
    )


def test_a_slice_that_is_taken_away_while_scp_hangs_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, engine: GcloudEngine, connections: Connections, tmp_path: Path
) -> None:
    cloud = HangingCloud(monkeypatch, "scp")
    assert train(engine, tmp_path) == {"event": "result"}
    assert cloud.told.count("create") == 2


def test_a_slice_that_is_taken_away_before_it_is_ready_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, engine: GcloudEngine, connections: Connections, tmp_path: Path
) -> None:
    """Else it takes one of the task's few tries; a run of days on spot chips meets many."""
    cloud = HangingCloud(monkeypatch)
    states = iter([None, "CREATING", "PREEMPTED", "PREEMPTED"])
    monkeypatch.setattr(engine, "_state", lambda: next(states, cloud.state))
    assert train(engine, tmp_path, restarts=1) == {"event": "result"}
    assert [verb for verb in cloud.told if verb in ("create", "delete")] == [
        *("create", "delete", "create", "delete")
    ]
    states = iter([None, "PREEMPTED"])
    with pytest.raises(Away, match="taken away before use, in 1 attempts without"):
        train(engine, tmp_path, restarts=0)


def test_a_signal_that_hangs_does_not_keep_the_connection(
    monkeypatch: pytest.MonkeyPatch, engine: GcloudEngine
) -> None:
    cloud = HangingCloud(monkeypatch, "ssh", "ssh")
    connection = subprocess.Popen(
        ["sleep", "600"], stdin=subprocess.PIPE, start_new_session=True, text=True
    )
    engine._connection = connection
    engine.stop()
    engine.kill()
    assert connection.returncode == -signal.SIGKILL
    assert cloud.told == ["ssh", "ssh"] and max(cloud.seconds) <= 60


def test_a_deletion_that_hangs_is_logged_and_hides_no_error(
    monkeypatch: pytest.MonkeyPatch, engine: GcloudEngine, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gcloud, "OUTAGE_SECONDS", -1.0)
    HangingCloud(monkeypatch, "delete")
    engine.delete()
    assert "kiln may remain and cost money" in caplog.text


class Cloud(Connections):
    """Stands in for gcloud: one slice with its label. `fails` are verbs that fail once each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        super().__init__(monkeypatch, tmp_path)
        self.told, self.fails = list[str](), list[str]()
        self.state, self.request, self.owner = "", "", ""
        self.interrupted = ""  # verb after which the run is interrupted, once
        self.lock_is_lost = False
        self.folder = tmp_path
        monkeypatch.setattr(gcloud, "run_command", self.run)
        monkeypatch.setattr(gcloud, "check_held", self.check_held)
        monkeypatch.setattr(attempts, "check_held", self.check_held)

    def open(self, command: list[str], **options: Any) -> Any:
        self.connected()
        return super().open(command, **options)

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

    def connected(self) -> None:
        """What happens to the slice while it trains; tests replace it."""

    def check_held(self, *, ask: bool = False) -> None:
        if self.lock_is_lost:
            raise LockLost("another process builds the artifact")

    def attempt(self, **tpu: Any) -> Any:
        self.told.clear()
        tpu_slice = Slice(Tpu(**SLICE, **tpu), OWNER)
        return train(GcloudEngine(tpu_slice, "xla", poll_seconds=0.0, code=b""), self.folder)


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
    cloud.trains = [AWAY]
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
    ("said", "outage"), [(CUT, 4), (STOPPED, 0)], ids=["cut", "stopped by another worker"]
)
def test_a_lost_connection_or_an_outage_gives_no_slice_up(
    cloud: Cloud, said: Events, outage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connected() -> None:
        cloud.fails += ["describe"] * outage
        monkeypatch.setattr(cloud, "connected", lambda: None)

    monkeypatch.setattr(cloud, "connected", connected)
    cloud.trains = [said]
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
    monkeypatch.setattr(cloud, "connected", lambda: setattr(cloud, "lock_is_lost", True))
    cloud.trains = [CUT]
    with pytest.raises(LockLost):
        cloud.attempt()
    assert "delete" not in cloud.told and "tpu-vm delete kiln" in caplog.text
    cloud.state = ""
    with pytest.raises(LockLost):  # it creates none
        cloud.attempt()
    assert not cloud.told


def test_a_run_that_loses_its_lock_during_the_set_up_does_not_train(
    engine: GcloudEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*, ask: bool) -> None:
        raise LockLost("another process builds the artifact")

    HangingCloud(monkeypatch)
    monkeypatch.setattr(gcloud, "check_held", lost)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(LockLost):
        engine.start(AGENTS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_to_the_agent_of_one_attempt_reaches_its_rank_and_no_other(
    tmp_path: Path, number: signal.Signals
) -> None:
    def agent(job: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["python3", "-c", RANK, "host_agent", f"{tmp_path}/{job}"], stdout=-1
        )

    ours, other = agent("1a.json"), agent("1b.json")
    ranks = [int(process.stdout.readline()) for process in (ours, other) if process.stdout]
    try:
        script = gcloud._signal(f"{tmp_path}/1a.json", number)
        subprocess.run(["bash", "-c", script], check=True)
        assert ours.wait(10) == -number
        assert other.poll() is None
        if number == signal.SIGKILL:
            wait_until(lambda: not Path(f"/proc/{ranks[0]}").exists())
        assert Path(f"/proc/{ranks[1]}").exists()
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)


def test_a_slice_of_another_training_is_refused_and_stays(cloud: Cloud) -> None:
    cloud.state, cloud.owner = "READY", "another"
    with pytest.raises(Away, match=r"of another training.*tpu-vm delete kiln"):
        cloud.attempt()
    assert cloud.told == ["describe"]


@pytest.mark.parametrize("queued", [False, True], ids=["slice", "request"])
def test_what_another_run_made_after_a_preemption_stays(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, queued: bool
) -> None:
    def connected() -> None:
        cloud.owner, cloud.state = "another", "" if queued else cloud.state

    if queued:
        cloud.state, cloud.request, cloud.owner = "READY", "ACTIVE", OWNER
    monkeypatch.setattr(cloud, "connected", connected)
    cloud.trains = [CUT]
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

    def settled(engine: GcloudEngine) -> str:
        cloud.lock_is_lost = True
        return "CREATING"  # the successor's

    monkeypatch.setattr(GcloudEngine, "_settled_state", settled)
    cloud.trains = [CUT]
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


def test_a_connection_that_no_agent_used_is_an_error_with_its_lines(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "worker.sh: line 40: .venv/bin/python: No such file or directory"
    popen = cloud._popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **options: popen(["echo", said], **options)
    )
    with pytest.raises(JobFailed, match="No such file or directory"):
        cloud.attempt()
    assert cloud.told.count("scp") == 1 and cloud.told[-1] == "delete"


def test_a_set_up_that_fails_on_a_slice_that_is_there_is_no_lost_slice(cloud: Cloud) -> None:
    cloud.fails = ["scp"]
    with pytest.raises(Away, match="cannot be set up: Unable to reach"):
        cloud.attempt()
    assert cloud.told.count("create") == 1 and cloud.told[-1] == "delete"


def test_listed_variables_are_copied_where_nobody_else_reads_them(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = {}

    def copy(command: list[str], seconds: float = 0) -> str:
        if command[4] == "scp" and command[5].endswith("environment"):
            copied[command[7].rpartition(".")[2]] = Path(command[5]).read_text()
            assert Path(command[5]).stat().st_mode & 0o077 == 0
        assert not [word for word in command if "key of mine" in word]
        return cloud.run(command)

    monkeypatch.setattr(gcloud, "run_command", copy)
    monkeypatch.setenv("WANDB_API_KEY", "key of mine")
    cloud.attempt(environment=["WANDB_API_KEY"])
    assert list(copied.values()) == ["export WANDB_API_KEY='key of mine'\n"]
