"""The limit of `kiln place --accelerators` holds over runs and processes of a real server."""

from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from prefect_server import Server

from tasks.publish.registry import Registry

pytestmark = pytest.mark.soak
POOLS = ("cpu", "gpu")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of the test's own, since the limit would hold up all other tests."""
    found = Server(tmp_path)
    try:
        found.serve()
        for pool in POOLS:
            found.cli("work-pool", "create", pool, "--type", "process")
        found.cli("deploy", "--name", "finetune/cpu", "--prefect-file", "deploy/prefect.yaml")
        yield found
    finally:
        found.stop()


def test_two_trainings_with_one_accelerator_never_run_at_once(
    server: Server,
    first: dict[str, Any],  # the store has all that is before training
    small: dict[str, Any],
    here: Callable[..., str],
    tmp_path: Path,
) -> None:
    given = {**small, "place.train": "gpu", "shared_folders": [str(tmp_path)], "train.steps": 60}
    here("place", "digits", "--accelerators", "1", overrides=given, api=server.api)
    rates = (3e-4, 6e-4)
    runs = [
        server.run("finetune/cpu", {**given, "train.learning_rate": rate}, until="train")
        for rate in rates
    ]
    for pool in POOLS:
        server.start(f"worker-{pool}", "worker", "start", "--pool", pool)
    for run in runs:
        assert server.ended(run) == "Completed"
    one, other = sorted(trainings(server), key=lambda task: moment(task, "start_time"))
    run = server.ask(f"/flow_runs/{other['flow_run_id']}")
    assert moment(run, "start_time") < moment(one, "end_time"), "none waited for the other"
    assert moment(one, "end_time") <= moment(other, "start_time")


def test_a_champion_is_measured_on_the_pool_of_the_evaluation(
    server: Server,
    first: dict[str, Any],
    small: dict[str, Any],
    here: Callable[..., str],
    tmp_path: Path,
) -> None:
    given = {**small, "place.evaluate": "gpu", "shared_folders": [str(tmp_path)]}
    given |= {"evaluate.num_inference_steps": 3, "publish.gate": ["holdout_loss < champion * 1.01"]}
    here("place", "digits", "--accelerators", "1", overrides=given, api=server.api)
    run = server.run("finetune/cpu", given)
    for pool in POOLS:
        server.start(f"worker-{pool}", "worker", "start", "--pool", pool)
    assert server.ended(run) == "Completed"
    found = server.ask("/task_runs/filter", {})
    built = [one for one in found if one["name"] == "evaluate" and one["tags"] == ["accelerator"]]
    states = sorted(one["state_name"] for one in built)
    assert states == ["Completed", "Reused"], "another run measured the champion alone"
    champion = Registry(f"{small['store']}/registry", "digits").champion()
    assert champion is not None and champion.name == "v2"


def trainings(server: Server) -> list[dict[str, Any]]:
    """The tasks that train, of the runs on the accelerator's pool."""
    found: list[dict[str, Any]] = server.ask("/task_runs/filter", {})
    return [one for one in found if one["name"] == "train" and one["tags"] == ["accelerator"]]


def moment(task: dict[str, Any], name: str) -> datetime:
    return datetime.fromisoformat(task[name])
