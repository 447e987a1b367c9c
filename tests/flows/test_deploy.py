"""On a server: deploy all, start a worker, run the demo's deployment; cancel a run.

No resolver sees the version traps in requirements/README.md: this test does.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kiln_command import is_running, processes_below
from prefect_server import Server, deployed

from configs.load_and_extend_recipe import load_recipe
from configs.settings.recipe import STAGES
from flows.retrain import one_at_a_time

#: Two workers of one pool would start each other's runs.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deployed")]
PATIENCE = 600  # seconds, for a machine that does much else
ENDS = ("Completed", "Rejected", "Failed", "Crashed")
#: Whose results each stage is given.
PARENTS = {
    "encode": ["download"],
    "train": ["encode"],
    "evaluate": ["download", "encode", "train"],
    "publish": ["download", "encode", "train", "evaluate"],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, api: str) -> Iterator[Server]:
    with deployed(tmp_path_factory.mktemp("prefect"), api) as found:
        yield found


def test_the_demos_deployment_completes_and_is_shown(server: Server, small: dict[str, Any]) -> None:
    given = f"overrides={json.dumps(small)}"
    said = server.cli("deployment", "run", "finetune/digits", "-p", given)
    run = next(word for word in said.split() if word.count("-") == 4 and len(word) == 36)
    server.wait("run", lambda: server.state(run) in ENDS, PATIENCE)
    assert server.state(run) == "Completed"
    found = server.ask(
        "/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}, "limit": 100}
    )
    shown = {a["key"]: a["data"] for a in found if a["type"] == "markdown"}
    assert {f"digits-{name}" for name in (*STAGES, "model")} <= set(shown)
    for stage in ("download", "train", "evaluate", "publish"):
        assert "](data:image/" in shown[f"digits-{stage}"], stage
    assert all(len(text) < 300_000 for text in shown.values())
    assert {"digits-train-progress", "digits-download-progress"} <= {a["key"] for a in found}
    completed = dict.fromkeys(STAGES, "Completed")
    server.wait("its tasks", lambda: server.tasks(run) == completed, PATIENCE)
    assert server.edges(run) == {
        (parent, stage) for stage, parents in PARENTS.items() for parent in parents
    }
    again = server.run("finetune/digits", small)
    server.wait("run", lambda: server.state(again) in ENDS, PATIENCE)
    reused = dict.fromkeys(STAGES, "Reused")  # Prefect records tasks' states later than the run's
    server.wait("its tasks", lambda: server.tasks(again) == reused, PATIENCE)


def test_a_rejected_model_leaves_no_failed_task(
    server: Server, first: dict[str, Any], small: dict[str, Any]
) -> None:
    strict = {**small, "publish.gate": ["digit/new >= 1.1"], "publish.name": "strict"}
    run = server.run("finetune/digits", strict)
    server.wait("run", lambda: server.state(run) in ENDS, PATIENCE)
    assert server.state(run) == "Rejected"
    ended = {**dict.fromkeys(STAGES, "Reused"), "publish": "Rejected"}
    server.wait("its tasks", lambda: server.tasks(run) == ended, PATIENCE)
    asked = {"artifacts": {"flow_run_id": {"any_": [run]}}}
    shown = {a["key"]: a["data"] for a in server.ask("/artifacts/filter", asked)}
    assert re.search(r"\| 1\.1 \|[^\n]*\| failed \|", shown["strict-publish"])
    assert "strict-model" not in shown and "digits-publish" not in shown


@pytest.mark.soak
def test_a_run_up_to_a_stage_ends_there(
    server: Server, first: dict[str, Any], small: dict[str, Any]
) -> None:
    run = server.run("finetune/digits", small, until="encode")
    server.wait("run", lambda: server.state(run) in ENDS, PATIENCE)
    assert server.state(run) == "Completed"
    ended = {"download": "Reused", "encode": "Reused"}
    server.wait("its tasks", lambda: server.tasks(run) == ended, PATIENCE)


def test_a_scheduled_run_appears(server: Server) -> None:
    deployment = server.ask("/deployments/name/retrain/digits")

    def scheduled() -> Any:
        runs = {"deployments": {"id": {"any_": [deployment["id"]]}}}
        return server.ask("/flow_runs/filter", runs)

    found = server.wait("scheduled run", scheduled, PATIENCE)
    assert {run["state"]["type"] for run in found} == {"SCHEDULED"}


@pytest.mark.extended
def test_a_changed_source_starts_a_retraining_after_the_one_that_runs(
    server: Server, first: dict[str, Any], small: dict[str, Any]
) -> None:
    """The event of the sensor starts it, by the automation that `prefect deploy` has made."""
    deployment = server.ask("/deployments/name/retrain/digits")
    parameters = {"recipe": "digits", "overrides": small}
    server.update(f"/deployments/{deployment['id']}", {"parameters": parameters})

    def triggered() -> list[dict[str, Any]]:
        runs = {"deployments": {"id": {"any_": [deployment["id"]]}}}
        found = server.ask("/flow_runs/filter", runs)
        return [run for run in found if (run["created_by"] or {}).get("type") == "AUTOMATION"]

    def ended(name: str) -> str:
        run = server.run(name, small)
        ends = (*ENDS, "Unchanged", "Cancelled", "Waiting")
        server.wait(name, lambda: server.state(run) in ends, PATIENCE)
        return server.state(run)

    with one_at_a_time(load_recipe("digits", small)):  # a retraining waits, so it is running
        running = server.run("retrain/digits", small)
        server.wait("first", lambda: server.state(running) == "Running", PATIENCE)
        assert ended("retrain/digits") == "Cancelled", "one at a time"
        assert ended("watch-source/digits") == "Waiting", "a run of its event would be cancelled"
    server.wait("first", lambda: server.state(running) in (*ENDS, "Unchanged"), PATIENCE)
    assert server.state(running) == "Unchanged" and triggered() == []
    for lock in Path(str(small["store"])).glob("registry/digits/retrain-lock.json*"):
        os.utime(lock, (1, 1))  # as if a minute had passed
    assert ended("watch-source/digits") == "Completed"
    (run,) = server.wait("the triggered run", triggered, PATIENCE)
    server.wait("its end", lambda: server.state(run["id"]) in (*ENDS, "Unchanged"), PATIENCE)
    assert server.state(run["id"]) == "Unchanged"
    shown = server.ask("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}})
    assert "no new rows since v1" in {a["key"]: a["data"] for a in shown}["digits-retrain"]
    assert ended("watch-source/digits") == "Unchanged"


def test_a_cancelled_run_leaves_a_checkpoint_and_no_process(
    server: Server, small: dict[str, Any]
) -> None:
    """The checkpoint is that of a requested stop, not of a kill."""
    endless = {**small, "train.steps": 100_000, "train.checkpointing_steps": 100_000}
    run = server.run("finetune/digits", endless)
    store = Path(str(small["store"]))

    def training() -> bool:
        shown = server.ask("/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}})
        return any(a["key"] == "digits-train-progress" for a in shown)

    server.wait("training", training, PATIENCE)
    _, _, pid = server.ask(f"/flow_runs/{run}")["infrastructure_pid"].rpartition(":")
    below = processes_below(int(pid))
    assert [args for args in below.values() if "-m runtimes" in args]
    server.cli("flow-run", "cancel", run)
    server.wait("cancelled", lambda: server.state(run) == "Cancelled", PATIENCE)
    left = {int(pid), *below}
    server.wait("its end", lambda: not any(map(is_running, left)), PATIENCE)
    (checkpoint,) = store.glob("train/*/checkpoints/step-*/manifest.json")
    assert int(checkpoint.parent.name.removeprefix("step-")) > 0
    assert not list(store.glob("train/*/manifest.json"))
