"""On a server: deploy all, start a worker, run the demo's deployment; cancel a run.

No resolver sees the version traps in requirements/README.md: this test does.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kiln_command import is_running, processes_below
from prefect_server import Server, deployed

from configs.load_recipe import load_recipe
from flows.retrain import one_at_a_time
from tasks.publish.stage import registry_of

#: Two workers of one pool would start each other's runs.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deployed")]
PATIENCE = 600  # seconds, for a machine that does much else
STAGES = load_recipe("digits").stages
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
    assert server.ended(run) == "Completed"
    shown = server.shown(run)
    assert {"digits-train-progress", "digits-download-progress"} <= shown.keys()
    texts = {key: str(text) for key, text in shown.items()}
    assert {f"digits-{name}" for name in (*STAGES, "model")} <= texts.keys()
    for stage in ("download", "train", "evaluate", "publish"):
        assert "](data:image/" in texts[f"digits-{stage}"], stage
    assert all(len(text) < 300_000 for text in texts.values())
    completed = dict.fromkeys(STAGES, "Completed")
    server.wait("its tasks", lambda: server.tasks(run) == completed, PATIENCE)
    assert server.edges(run) == {
        (parent, stage) for stage, parents in PARENTS.items() for parent in parents
    }
    again = server.run("finetune/digits", small)
    server.ended(again)
    reused = dict.fromkeys(STAGES, "Reused")  # Prefect records tasks' states later than the run's
    server.wait("its tasks", lambda: server.tasks(again) == reused, PATIENCE)


def test_a_rejected_model_leaves_no_failed_task(
    server: Server, first: dict[str, Any], small: dict[str, Any]
) -> None:
    strict = {**small, "publish.gate": ["digit/new >= 1.1"], "publish.name": "strict"}
    run = server.run("finetune/digits", strict)
    assert server.ended(run) == "Rejected"
    ended = {**dict.fromkeys(STAGES, "Reused"), "publish": "Rejected"}
    server.wait("its tasks", lambda: server.tasks(run) == ended, PATIENCE)
    shown = server.shown(run)
    assert re.search(r"\| 1\.1 \|[^\n]*\| failed \|", shown["strict-publish"])
    assert "strict-model" not in shown and "digits-publish" not in shown


def test_a_scheduled_run_appears(server: Server) -> None:
    deployment = server.ask("/deployments/name/retrain/digits")

    def scheduled() -> Any:
        runs = {"deployments": {"id": {"any_": [deployment["id"]]}}}
        return server.ask("/flow_runs/filter", runs)

    found = server.wait("scheduled run", scheduled, PATIENCE)
    assert {run["state"]["type"] for run in found} == {"SCHEDULED"}


@pytest.mark.soak
def test_retrainings_wait_for_each_other_and_find_nothing_new(
    server: Server, first: dict[str, Any], small: dict[str, Any]
) -> None:
    with one_at_a_time(registry_of(load_recipe("digits", small))):
        running = [server.run("retrain/digits", small) for _ in range(2)]
        for run in running:
            server.wait(run, lambda run=run: server.state(run) == "Running", PATIENCE)
    assert [server.ended(run) for run in running] == ["Unchanged"] * 2
    for run in running:
        assert server.tasks(run).keys() == {"compare"}
        assert "no new rows since v1" in server.shown(run)["digits-retrain"]


def test_a_cancelled_run_leaves_a_checkpoint_and_no_process(
    server: Server, small: dict[str, Any]
) -> None:
    """The checkpoint is that of a requested stop, not of a kill."""
    endless = {**small, "train.steps": 100_000, "train.checkpointing_steps": 100_000}
    run = server.run("finetune/digits", endless)
    store = Path(str(small["store"]))

    server.wait("training", lambda: "digits-train-progress" in server.shown(run), PATIENCE)
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
