"""On a server: deploy all, start a worker, run the demo's deployment; cancel a run.

No resolver sees the version traps in requirements/README.md: this test does.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from command import is_running, processes_below
from server import Server

pytestmark = pytest.mark.slow
PATIENCE = 600  # seconds, for a machine that does much else


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, api: str) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("prefect"), api)
    try:
        found.cli("work-pool", "create", "kiln", "--type", "process")
        found.cli("deploy", "--all", "--prefect-file", "deploy/prefect.yaml")
        found.start("worker", "worker", "start", "--pool", "kiln")
        yield found
    finally:
        found.stop()


class Done(NamedTuple):
    """A run of the demo's deployment that has ended."""

    id: str
    overrides: dict[str, Any]


@pytest.fixture(scope="module")
def done(
    server: Server, smallest: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Done:
    """The first run in a store, which later ones reuse."""
    overrides = {**smallest, "store": str(tmp_path_factory.mktemp("deployed") / "store")}
    given = f"overrides={json.dumps(overrides)}"
    said = server.cli("deployment", "run", "finetune/digits", "-p", given)
    run = next(word for word in said.split() if word.count("-") == 4 and len(word) == 36)
    wait_for_the_end(server, run)
    return Done(run, overrides)


def wait_for_the_end(server: Server, run: str) -> None:
    server.wait("run", lambda: server.state(run) in ("Completed", "Failed", "Crashed"), PATIENCE)


def states(server: Server, run: str) -> dict[str, str]:
    """The state of each of a run's tasks."""
    tasks = server.ask("/task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
    found = {task["name"]: task["state"]["name"] for task in tasks}
    assert len(found) == len(tasks)
    return found


def test_the_demos_deployment_ends_completed_and_shows_itself(server: Server, done: Done) -> None:
    run = done.id
    assert server.state(run) == "Completed"
    found = server.ask(
        "/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}, "limit": 100}
    )
    shown = {a["key"]: a["data"] for a in found if a["type"] == "markdown"}
    assert {"download", "encode", "train", "evaluate", "publish", "model"} <= set(shown)
    for stage in ("download", "train", "evaluate", "publish"):
        assert "](data:image/png;base64," in shown[stage], stage
    assert {"train-progress", "download-progress"} <= {a["key"] for a in found}
    stages = ["download", "encode", "evaluate", "publish", "train"]
    assert sorted(states(server, run)) == stages


@pytest.mark.soak
def test_all_of_a_second_run_is_cached(server: Server, done: Done) -> None:
    """The run that is cancelled below shows it of its first stages."""
    again = server.run("finetune/digits", done.overrides)
    wait_for_the_end(server, again)
    assert set(states(server, again).values()) == {"Cached"}


def test_a_scheduled_run_appears(server: Server) -> None:
    deployment = server.ask("/deployments/name/finetune/retrain-digits")

    def scheduled() -> Any:
        runs = {"deployments": {"id": {"any_": [deployment["id"]]}}}
        return server.ask("/flow_runs/filter", runs)

    found = server.wait("scheduled run", scheduled, PATIENCE)
    assert {run["state"]["type"] for run in found} == {"SCHEDULED"}


def test_a_cancelled_run_leaves_a_checkpoint_and_no_process(server: Server, done: Done) -> None:
    """It was not killed for want of time: the checkpoint is the one that it leaves when asked. What
    came before training was cached."""
    endless = {**done.overrides, "train.steps": 100_000, "train.checkpoint_every": 100_000}
    store = Path(str(done.overrides["store"]))
    trained = set(store.glob("train/*"))
    run = server.run("finetune/digits", endless)

    def training() -> bool:
        shown = server.ask("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}})
        return any(a["key"] == "train-progress" for a in shown)

    server.wait("training", training, PATIENCE)
    _, _, pid = server.ask(f"/flow_runs/{run}")["infrastructure_pid"].rpartition(":")
    below = processes_below(int(pid))
    assert [args for args in below.values() if "-m runtimes" in args]
    server.cli("flow-run", "cancel", run)
    server.wait("cancelled", lambda: server.state(run) == "Cancelled", PATIENCE)
    left = {int(pid), *below}
    server.wait("its end", lambda: not any(map(is_running, left)), PATIENCE)
    found = states(server, run)
    assert (found["download"], found["encode"]) == ("Cached", "Cached")
    (unfinished,) = set(store.glob("train/*")) - trained
    (checkpoint,) = unfinished.glob("checkpoints/step-*/manifest.json")
    assert int(checkpoint.parent.name.removeprefix("step-")) > 0
    assert not (unfinished / "manifest.json").exists()
