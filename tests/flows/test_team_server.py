"""A team's server for a while: PostgreSQL, Redis, workers of three pools, four runs at once.

Runs of two recipes share stages. One is cancelled, a worker is killed, the server restarts, and
the database is away. All runs end as they should, and each artifact is built once.
"""

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from chips import unless_required
from fsspec.implementations.local import LocalFileSystem
from kiln_command import ROOT, command, is_running, jobs_of
from team_server import Stopwatch, TeamServer, missing_programs

from artifacts.compare_and_swap import read

pytestmark = pytest.mark.soak
PATIENCE = 600  # seconds, for a machine that does much else
STEPS = 200
AWAY = 20.0  # seconds without the database
POOLS = ("cpu", "gpu", "small")
Overrides = dict[str, Any]


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, recipes: dict[str, Overrides]
) -> Iterator[TeamServer]:
    """A team's server with the deployment of flows on pool `cpu`, and workers of all pools."""
    if reason := unless_required("team-server", missing_programs()):
        pytest.skip(reason)
    found = TeamServer(tmp_path_factory.mktemp("team"))
    try:
        found.serve()
        for pool in POOLS:
            found.cli("work-pool", "create", pool, "--type", "process")
        found.cli("deploy", "--name", "finetune/cpu", "--prefect-file", "deploy/prefect.yaml")
        done = subprocess.run(
            command("place", "digits", overrides=recipes["other"]), env=found.env, cwd=ROOT
        )
        assert done.returncode == 0
        for pool in POOLS:
            found.work(pool)
        yield found
    finally:
        found.stop()


@pytest.fixture(scope="module")
def recipes(
    tmp_path_factory: pytest.TempPathFactory, smallest: dict[str, Any]
) -> dict[str, Overrides]:
    """Two recipes that share `download` and `encode`; only one encodes on a pool of its own."""
    folder = tmp_path_factory.mktemp("shared")
    shared = {
        **smallest,
        "store": str(folder / "store"),
        "shared_folders": [str(folder)],
        "place.download": "small",
        "place.train": "gpu",
        "train.steps": STEPS,
        "train.checkpointing_steps": 10,
        "train.sample_every_n_steps": STEPS,
    }
    other = {"publish.name": "other", "train.learning_rate": 5e-4, "place.encode": "cpu"}
    return {"digits": shared, "other": {**shared, **other}}


class Training:
    """The training of a recipe, in whichever run it happens.

    A test holds it by SIGSTOP: what happens to it then does not depend on the machine's speed.
    """

    def __init__(self, server: TeamServer, folder: Path) -> None:
        self.server, self.folder, self.key = server, folder, folder.name

    def owner(self) -> int:
        """Pid of the flow process that holds the artifact's lock; 0 without one."""
        data = read(LocalFileSystem(), str(self.folder / "lock.json")).data
        owner = json.loads(data or b"null")
        return int(owner["pid"]) if owner else 0

    def job(self) -> int:
        """Pid of the process that trains; 0 without one."""
        return next(iter(jobs_of(owner)), 0) if (owner := self.owner()) else 0

    def step(self) -> int:
        """The newest checkpoint's step."""
        found = self.folder.glob("checkpoints/step-*/manifest.json")
        return max((int(one.parent.name.removeprefix("step-")) for one in found), default=0)

    def hold(self, after: int) -> int:
        """Stop the process once it has written a checkpoint after a step; its pid."""
        job = self.server.wait("a checkpoint", lambda: self.step() > after and self.job(), PATIENCE)
        os.kill(job, signal.SIGSTOP)
        return int(job)

    def release(self) -> None:
        os.kill(self.job(), signal.SIGCONT)


def test_runs_survive_kill_restart_lost_database_and_cancel(
    server: TeamServer, recipes: dict[str, Overrides]
) -> None:
    watch, store = Stopwatch(), Path(str(recipes["digits"]["store"]))
    runs = [server.run("finetune/cpu", one) for _ in range(2) for one in recipes.values()]
    held, ending = begun(server, store)
    kill_the_worker(server, [held, ending], watch)
    restart_the_server(server, ending, watch)
    lose_the_database(server, ending, watch)
    cancelled = cancel_one(server, held, watch)
    expected = {run: "Cancelled" if run == cancelled else "Completed" for run in runs}
    assert {run: server.ended(run) for run in runs} == expected
    print(f"all ended after {time.monotonic() - watch.begun:.0f} s", flush=True)
    builds = built(server)
    assert Counter(stage for stage, _ in builds) == {
        **{"plan": 1, "download": 1, "encode": 1},
        **{"train": 2, "evaluate": 2, "publish": 2},
    }
    assert set(builds.values()) == {1}
    assert not held.owner() and not ending.owner()


def begun(server: TeamServer, store: Path) -> list[Training]:
    """Both recipes' trainings, each with a checkpoint, and both held."""

    def both() -> list[Path]:
        found = sorted(store.glob("train/*/checkpoints"))
        return found if len(found) == 2 else []

    folders = server.wait("both trainings", both, PATIENCE)
    trainings = [Training(server, folder.parent) for folder in folders]
    for training in trainings:
        training.hold(after=0)
    return trainings


def kill_the_worker(server: TeamServer, trainings: list[Training], watch: Stopwatch) -> None:
    """Kill the accelerator's worker with all its runs; they are sent again to a new worker."""
    before = {one.key: one.step() for one in trainings}
    since = time.monotonic()
    killed = server.kill_worker("gpu")
    server.wait("the kernel", lambda: not any(map(is_running, killed)), PATIENCE)
    server.work("gpu")
    for one in trainings:
        server.wait("training", one.job, PATIENCE)
    watch.until("worker killed: both train again", lambda: None, since)
    for one in trainings:
        one.hold(after=before[one.key])
    watch.until("worker killed: both came further", lambda: None, since)


def restart_the_server(server: TeamServer, training: Training, watch: Stopwatch) -> None:
    """Restart web server and background services while stages are built."""
    since = time.monotonic()
    server.stop_prefect()
    server.serve_prefect()
    back, now = time.monotonic(), datetime.now(UTC)
    watch.until("server restarted: it answers", lambda: None, since)
    step = training.step()
    training.release()
    server.wait("progress", lambda: reported_since(server, now), PATIENCE)
    watch.until("server back: a run reports", lambda: None, back)
    training.hold(after=step)


def lose_the_database(server: TeamServer, training: Training, watch: Stopwatch) -> None:
    """Stop PostgreSQL for a while, in which a stage trains on."""
    server.postgresql.stop()
    since = time.monotonic()
    training.release()
    time.sleep(AWAY)
    server.postgresql.start()
    watch.until("database away", lambda: None, since)
    back, now = time.monotonic(), datetime.now(UTC)
    server.wait("server", server.is_ready, PATIENCE)
    watch.until("database back: the server is ready", lambda: None, back)
    server.wait("progress", lambda: reported_since(server, now), PATIENCE)
    watch.until("database back: a run reports", lambda: None, back)


def cancel_one(server: TeamServer, training: Training, watch: Stopwatch) -> str:
    """Cancel the run whose stage trains: it leaves nothing, and the recipe's other run trains."""
    owner, job, step = training.owner(), training.job(), training.step()
    folder = Path(next(one for one in command_of(job) if one.endswith("job.json"))).parent
    sent = next(run for run in sent_runs(server) if pid_of(run) == owner)
    run = str(server.ask(f"/task_runs/{sent['parent_task_run_id']}")["flow_run_id"])
    flow = pid_of(server.ask(f"/flow_runs/{run}"))
    since = time.monotonic()
    server.cli("flow-run", "cancel", run)
    server.wait("the request to stop", lambda: is_asked_to_stop(job), PATIENCE)
    os.kill(job, signal.SIGCONT)
    for pid in (owner, job, flow):
        server.wait(f"the end of {pid}", lambda pid=pid: not is_running(pid), PATIENCE)
    watch.until("cancelled: no process is left", lambda: None, since)
    for one in (run, str(sent["id"])):
        server.wait("Cancelled", lambda one=one: server.state(one) == "Cancelled", PATIENCE)
    assert not folder.exists() and training.step() > step
    server.wait("training", training.job, PATIENCE)
    watch.until("cancelled: the other run trains", lambda: None, since)
    return run


def sent_runs(server: TeamServer) -> list[dict[str, Any]]:
    asked = {"flows": {"name": {"any_": ["kiln-stage"]}}}
    found: list[dict[str, Any]] = server.ask("/flow_runs/filter", asked)
    return found


def pid_of(run: dict[str, Any]) -> int:
    """Pid of a flow run's process on a pool of type process."""
    return int(str(run["infrastructure_pid"] or 0).rpartition(":")[2])


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def is_asked_to_stop(pid: int) -> bool:
    """Whether a SIGTERM waits for a held process."""
    status = Path(f"/proc/{pid}/status").read_text()
    waiting = re.search(r"ShdPnd:\s*([0-9a-f]+)", status)
    return waiting is not None and bool(int(waiting[1], 16) & 1 << signal.SIGTERM - 1)


def reported_since(server: TeamServer, moment: datetime) -> bool:
    """Whether a run has shown anything on the server since then."""
    found = server.ask("/artifacts/filter", {"sort": "UPDATED_DESC", "limit": 1})
    return bool(found) and datetime.fromisoformat(found[0]["updated"]) > moment


def built(server: TeamServer) -> Counter[tuple[str, str]]:
    """How often each artifact, as (stage, key), was built, by the logs of all workers."""
    text = "\n".join(path.read_text() for path in server.folder.glob("worker-*.log"))
    found = Counter(re.findall(r"(\w+): committed ([0-9a-f]{12})", text))
    for (stage, key), number in sorted(found.items()):
        print(f"built: {stage} {key} x {number}", flush=True)
    return found
