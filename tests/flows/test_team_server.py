"""A team's server for a while: PostgreSQL, Redis, workers of three pools, four runs at once.

Runs of two recipes share stages. One is cancelled, a worker is killed, the server restarts, and
the database is away. All runs end as they should, and each artifact is built once.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from chips import unless_required
from team_server import Stopwatch, TeamServer, missing_programs

pytestmark = pytest.mark.soak
PATIENCE = 600  # seconds, for a machine that does much else
POOLS = ("cpu", "gpu", "small")
ENDS = ("Completed", "Rejected", "Failed", "Crashed", "Cancelled")
Overrides = dict[str, Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TeamServer]:
    """A team's server with the deployment of flows on pool `cpu`, and workers of all pools."""
    if reason := unless_required("team-server", missing_programs()):
        pytest.skip(reason)
    found = TeamServer(tmp_path_factory.mktemp("team"))
    try:
        found.serve()
        for pool in POOLS:
            found.cli("work-pool", "create", pool, "--type", "process")
        found.cli("deploy", "--name", "finetune/cpu", "--prefect-file", "deploy/prefect.yaml")
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
        "train.steps": 120,
        "train.checkpointing_steps": 10,
        "train.sample_every_n_steps": 60,
    }
    other = {"publish.name": "other", "train.learning_rate": 5e-4, "place.encode": "cpu"}
    return {"digits": shared, "other": {**shared, **other}}


def test_four_runs_of_two_recipes_build_each_artifact_once(
    server: TeamServer, recipes: dict[str, Overrides], here: Callable[..., str]
) -> None:
    for overrides in recipes.values():
        here("place", "digits", overrides=overrides, api=server.api)
    began = time.monotonic()
    runs = {
        f"{name}-{number}": server.run("finetune/cpu", overrides)
        for number in (1, 2)
        for name, overrides in recipes.items()
    }
    watch = Stopwatch()
    for name, run in runs.items():
        watch.until(name, lambda run=run: ended(server, run), began)
    assert {name: server.state(run) for name, run in runs.items()} == dict.fromkeys(
        runs, "Completed"
    )
    builds = built(server)
    assert Counter(stage for stage, _ in builds) == {
        "plan": 1, "download": 1, "encode": 1, "train": 2, "evaluate": 2, "publish": 2
    }  # fmt: skip
    assert set(builds.values()) == {1}


def ended(server: TeamServer, run: str) -> str:
    def end() -> str | None:
        return state if (state := server.state(run)) in ENDS else None

    return str(server.wait("its end", end, PATIENCE))


def built(server: TeamServer) -> Counter[tuple[str, str]]:
    """How often each artifact, as (stage, key), was built, by the logs of all workers."""
    text = "\n".join(path.read_text() for path in server.folder.glob("worker-*.log"))
    found = Counter(re.findall(r"(\w+): committed ([0-9a-f]{12})", text))
    for (stage, key), number in sorted(found.items()):
        print(f"built: {stage} {key} x {number}", flush=True)
    return found
