"""On a server: deploy all, start a worker, run the demo's deployment; cancel a run.

No resolver sees the version traps in requirements/README.md: this test does.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server import Server

pytestmark = pytest.mark.slow


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


def test_the_demos_deployment_ends_completed_and_shows_itself(
    server: Server, small: dict[str, Any]
) -> None:
    run = server.run("finetune/digits", small)
    server.wait("run", lambda: server.state(run) in ("Completed", "Failed", "Crashed"), 300)
    assert server.state(run) == "Completed"
    found = server.ask(
        "/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}, "limit": 100}
    )
    shown = {a["key"]: a["data"] for a in found if a["type"] == "markdown"}
    assert {"download", "encode", "train", "evaluate", "publish", "model"} <= set(shown)
    for stage in ("download", "train", "evaluate", "publish"):
        assert "](data:image/png;base64," in shown[stage], stage
    assert {"train-progress", "download-progress"} <= {a["key"] for a in found}
    tasks = server.ask("/task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
    stages = ["download", "encode", "evaluate", "publish", "train"]
    assert sorted(t["name"] for t in tasks) == stages
    again = server.run("finetune/digits", small)
    server.wait("run", lambda: server.state(again) in ("Completed", "Failed", "Crashed"), 120)
    tasks = server.ask("/task_runs/filter", {"flow_runs": {"id": {"any_": [again]}}})
    assert {t["state"]["name"] for t in tasks} == {"Cached"}


def test_a_scheduled_run_appears(server: Server) -> None:
    deployment = server.ask("/deployments/name/finetune/retrain-digits")

    def scheduled() -> Any:
        runs = {"deployments": {"id": {"any_": [deployment["id"]]}}}
        return server.ask("/flow_runs/filter", runs)

    found = server.wait("scheduled run", scheduled, 90)
    assert {run["state"]["type"] for run in found} == {"SCHEDULED"}


def test_a_wrong_recipe_fails_before_any_stage(server: Server, small: dict[str, Any]) -> None:
    run = server.run("finetune/digits", {**small, "train.stepz": 3})
    server.wait("run", lambda: server.state(run) in ("Completed", "Failed", "Crashed"), 120)
    state = server.ask(f"/flow_runs/{run}")["state"]
    assert state["name"] == "Failed"
    assert "did you mean train.steps?" in state["message"]
    assert server.ask("/task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}}) == []


def test_a_cancelled_run_stops_within_its_grace_period_and_keeps_a_checkpoint(
    server: Server, small: dict[str, Any]
) -> None:
    endless = {**small, "train.steps": 100_000, "train.checkpoint_every": 100_000}
    run = server.run("finetune/digits", endless)
    store = Path(str(small["store"]))

    def training() -> bool:
        shown = server.ask("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}})
        return any(a["key"] == "train-progress" for a in shown)

    server.wait("training", training, 180)
    server.cli("flow-run", "cancel", run)
    server.wait("cancelled", lambda: server.state(run) == "Cancelled", 90)
    assert list(store.glob("train/*/checkpoints/step-*/manifest.json"))
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert not [
        line for line in listed.splitlines() if "-m runtimes" in line and store.name in line
    ]
