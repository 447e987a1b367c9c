"""The demo at its true size, retrained by a server and a worker: grown, poisoned, rolled back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prefect_server import Server, deployed

from artifacts.store import Store
from demo import dataset
from tasks.publish.registry import Registry

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.xdist_group("deployed")]
PATIENCE = 3600  # seconds, for a machine that does much else


@pytest.fixture
def server(tmp_path: Path, api: str) -> Iterator[Server]:
    (tmp_path / "prefect").mkdir()
    with deployed(tmp_path / "prefect", api) as found:
        yield found


def write_poisoned(folder: Path, list_file: Path) -> None:
    """The demo's pictures with the captions of others."""
    rows = pq.read_table(list_file).to_pylist()
    shuffled = np.random.default_rng(0).permutation([row["caption"] for row in rows])
    poisoned = [
        {"image": (list_file.parent / row["url"]).read_bytes(), "text": str(caption)}
        for row, caption in zip(rows, shuffled, strict=True)
    ]
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(poisoned), folder / "train-00000.parquet")


def test_scheduled_retrainings_publish_what_is_new_and_better(
    server: Server, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    registry = Registry(f"{store}/registry", "digits")
    write_poisoned(tmp_path / "poisoned", dataset.write(tmp_path / "pictures"))
    poison = {"kind": "dataset", "path": str(tmp_path / "poisoned")}

    seconds: list[float] = []  # of flow time
    ran: list[dict[str, str]] = []  # task -> state

    def retrain(overrides: dict[str, Any], *states: str) -> str:
        """The summary in the UI, after a run that ended in one of `states`."""
        run = server.run("retrain/digits", {"store": str(store), **overrides})
        server.ended(run, PATIENCE)
        found = server.ask(f"/flow_runs/{run}")
        print(found["state"]["name"], found["total_run_time"], "s", found["state"]["message"])
        assert found["state"]["name"] in states
        seconds.append(found["total_run_time"])
        ran.append(server.tasks(run))
        summary = str(server.shown(run)["digits-retrain"])
        print("\n".join(line for line in summary.splitlines() if "data:image" not in line))
        return summary

    def champion() -> str:
        found = registry.champion()
        assert found is not None
        return found.name

    def reference() -> dict[str, str]:
        """Digests of the pictures and latents that the champion was measured on."""
        version = registry.champion()
        assert version is not None
        key = version.manifest["run"]["parents"]["evaluation"]["key"]
        evaluated = Store(str(store)).load("evaluate", key)
        assert evaluated is not None and evaluated.summary["memorization"]["held_out_pictures"] > 0
        return {name: evaluated.manifest["inputs"][name] for name in ("images", "latents")}

    retrain({"source.count": 1497}, "Completed")
    assert champion() == "v1"
    before = reference()
    assert "no new rows since v1" in retrain({"source.count": 1497}, "Unchanged")
    assert ran[1].keys() == {"compare"}, "nothing is downloaded, encoded, trained or drawn"
    # 6.6 s and 505 s on a busy machine: a bound in seconds would fail on a busier one.
    assert seconds[1] < seconds[0] / 10
    grown = retrain({}, "Completed")
    assert reference() == before, "v2 is measured on the held-out rows of v1"
    assert {"* **new rows**: 300", "* **rows to fetch**: 300"} <= set(grown.splitlines())
    assert champion() == "v2"
    retrain({"source": poison}, "Rejected")
    assert champion() == "v2"
    assert "rejected a model" in retrain({"source": poison}, "Unchanged")
    assert registry.rollback().name == "v1"
    assert "v2 of these rows was published before" in retrain({}, "Unchanged")
    assert champion() == "v1"
    assert [move["version"] for move in registry.history().moves] == ["v1", "v2", "v1"]
