"""A stage on a work pool of a real server: its run is waited for, sent again, or cancelled.

The tests play the worker by setting states, so that no flow process is needed.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kiln_command import ROOT
from prefect_server import Server

from artifacts.filesystems import Clock
from artifacts.store import Store
from configs.errors import Away, Failed, Refused
from configs.load_recipe import load_recipe
from configs.settings.recipe import Recipe
from flows import send_stage
from flows.work_pools import LOST
from tasks.beam.workers import settings_to_send
from tasks.progress import Progress, listeners

pytestmark = pytest.mark.soak
PATIENCE = 300  # seconds, for a machine that does much else
POOL = "pool-without-workers"
RUNNING, COMPLETED = ({"type": name} for name in ("RUNNING", "COMPLETED"))
CRASHED = {"type": "CRASHED", "message": "preempted"}
FAILED = {"type": "FAILED", "message": "Flow run encountered an exception: no\nmemory"}


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe("digits", {"place.train": POOL, "store": "s3://bucket/store"})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, api: str) -> Server:
    found = Server(tmp_path_factory.mktemp("pool"), api)
    found.cli("work-pool", "create", POOL, "--type", "process")
    return found


@pytest.fixture
def client(at_home: Callable[..., None], api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect's client in this process uses the server."""
    at_home(api)
    monkeypatch.setattr(send_stage, "POLL_SECONDS", 0.1)


@pytest.fixture
def deployed(server: Server, here: Callable[..., str], api: str) -> str:
    """What `kiln place` says."""
    given = {"place.train": POOL, "place.encode": f"{POOL}/urgent"}
    return here("place", "digits", "--accelerators", "1", overrides=given, api=api)


@contextmanager
def worker(server: Server, *states: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Give each sent run the next state, once it is there; yields the runs in order."""
    before = {run["id"] for run in sent_runs(server)}
    found: list[dict[str, Any]] = []

    def work() -> None:
        for number, state in enumerate(states):
            run = server.wait("run", lambda number=number: new(number), PATIENCE)
            found.append(run)
            for one in (RUNNING, state):
                server.ask(f"/flow_runs/{run['id']}/set_state", {"state": one, "force": True})

    def new(number: int) -> Any:
        runs = [run for run in sent_runs(server) if run["id"] not in before]
        return runs[number] if len(runs) > number else None

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield found
    thread.join(PATIENCE)
    assert len([run for run in sent_runs(server) if run["id"] not in before]) == len(states)


def sent_runs(server: Server) -> list[dict[str, Any]]:
    asked = {"flows": {"name": {"any_": ["kiln-stage"]}}, "sort": "START_TIME_ASC"}
    runs: list[dict[str, Any]] = server.ask("/flow_runs/filter", asked)
    return sorted(runs, key=lambda run: str(run["created"]))


def send(recipe: Recipe) -> str:
    given = {"stage": "train", "settings": settings_to_send(recipe), "key": 64 * "0", "before": {}}
    clock = Clock(sleep=lambda seconds: None)
    here = Store("memory://store-of-work-pools")
    progress = Progress("train", "digits")
    about = (recipe.place.pools()["train"], recipe.publish.name, here, "train")
    return send_stage.send_stage(*about, given, progress, clock)


def test_kiln_place_makes_all_that_a_pool_needs(server: Server, deployed: str, api: str) -> None:
    assert f"deployed: kiln-stage/{POOL}" in deployed and deployed.count("deployed") == 1
    made = server.ask(f"/deployments/name/kiln-stage/{POOL}")
    assert made["work_pool_name"] == POOL
    (step,) = made["pull_steps"]
    assert step == {"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}
    (lost,) = [one for one in server.ask("/automations/filter", {}) if one["name"] == LOST]
    assert lost["trigger"]["posture"] == "Proactive"
    assert lost["trigger"]["after"] == ["prefect.flow-run.heartbeat"]
    assert lost["trigger"]["expect"] == ["prefect.flow-run.*"], "a scheduled run is not lost"
    assert lost["actions"][0]["state"] == "CRASHED"
    limit = server.ask("/concurrency_limits/tag/accelerator")
    assert limit["concurrency_limit"] == 1
    server.ask("/concurrency_limits/tag/accelerator", method="DELETE")  # the server is shared


def test_what_the_server_lacks_is_named_with_the_command(
    server: Server, client: None, here: Callable[..., str], api: str
) -> None:
    said = here("place", "digits", overrides={"place.train": "none"}, code=2, api=api)
    assert "no work pool none: run `prefect work-pool create none --type process`" in said
    recipe = load_recipe("digits", {"place.train": "none"})
    with pytest.raises(Refused, match="no deployment kiln-stage/none: run `kiln place"):
        send_stage.check_deployments(recipe.place, ("train",))
    send_stage.check_deployments(recipe.place, ("encode",))


def test_a_completed_run_is_sent_once(
    server: Server, deployed: str, client: None, recipe: Recipe
) -> None:
    with worker(server, COMPLETED) as runs:
        assert send(recipe) == "built"
    (run,) = runs
    assert run["name"] == "train of digits"
    assert run["parameters"]["settings"]["place"] == {}


def test_the_sender_of_a_stage_that_was_there_reports_it_as_reused(
    server: Server, deployed: str, client: None, recipe: Recipe
) -> None:
    with worker(server, {**COMPLETED, "name": "Reused"}):
        assert send(recipe) == "reused"


def test_a_crashed_run_is_sent_again_at_most_so_often(
    server: Server, deployed: str, client: None, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    with worker(server, CRASHED, COMPLETED):
        send(recipe)
    monkeypatch.setattr(send_stage, "MOST_CRASHES", 2)
    with worker(server, CRASHED, CRASHED), pytest.raises(Away, match="2 runs on pool"):
        send(recipe)


def test_a_failed_run_is_one_line_and_not_sent_again(
    server: Server, deployed: str, client: None, recipe: Recipe
) -> None:
    with worker(server, FAILED), pytest.raises(Failed) as error:
        send(recipe)
    assert str(error.value).endswith("failed: Flow run encountered an exception: no memory")


def test_an_interruption_cancels_the_run(
    server: Server, deployed: str, client: None, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(send_stage.SyncPrefectClient, "read_flow_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            send(recipe)
    assert server.state(sent_runs(server)[-1]["id"]) in ("Cancelling", "Cancelled")


def test_its_progress_is_shown_here(
    server: Server, deployed: str, client: None, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr("tasks.progress.listeners", [*listeners, lambda *said: seen.append(said)])
    before = len(sent_runs(server))

    def work() -> None:
        server.wait("run", lambda: len(sent_runs(server)) > before, PATIENCE)
        run = sent_runs(server)[-1]["id"]
        shown = {"type": "progress", "key": "digits-train-progress", "flow_run_id": run}
        server.ask("/artifacts/", {**shown, "data": 50.0, "description": "step 3 of 6"})
        server.wait("progress", lambda: bool(seen), PATIENCE)
        server.ask(f"/flow_runs/{run}/set_state", {"state": COMPLETED, "force": True})

    threading.Thread(target=work, daemon=True).start()
    send(recipe)
    assert seen[0] == ("train", 50, 100, "step 3 of 6")


def test_a_server_that_is_away_for_a_while_ends_nothing(
    server: Server, deployed: str, client: None, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx

    read, away = send_stage.SyncPrefectClient.read_flow_run, iter([True, True])

    def unsure(self: Any, run: Any) -> Any:
        if next(away, False):
            raise httpx.ConnectError("refused")
        return read(self, run)

    monkeypatch.setattr(send_stage.SyncPrefectClient, "read_flow_run", unsure)
    with worker(server, COMPLETED):
        send(recipe)
    assert next(away, None) is None
