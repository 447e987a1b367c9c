"""Records of runs: their stages, their retention, and damage to them."""

from typing import Any

import pytest
from gc_stores import DAY, age, collector, kinds, make, use
from store_servers import REMOTE, UrlOf

from artifacts.compare_and_swap import swap
from artifacts.gc import record_run, runs
from artifacts.store import KeyParts, Store
from configs.errors import Refused


@pytest.fixture(params=["local", *REMOTE])
def store(request: pytest.FixtureRequest, url_of: UrlOf) -> Store:
    return Store(url_of(request.param))


def test_a_run_record_accumulates_its_stages(store: Store) -> None:
    for stage in ("download", "encode"):
        record_run(store, "a-run", {"stages": {stage: [stage]}})
    (found,) = runs(store)
    assert found.keys == {("download", "download"), ("encode", "encode")}


def test_a_run_record_keeps_every_artifact_of_a_stage(store: Store) -> None:
    """A sweep trains several models; a retraining encodes, and selects from the latents."""
    keys = [("encode", "latents"), ("encode", "selection"), ("train", "1"), ("train", "2")]
    for stage, key in [*keys, ("encode", "latents")]:
        record_run(store, "a-run", {"stages": {stage: [key]}})
    (found,) = runs(store)
    assert found.keys == {*keys}


@pytest.mark.parametrize("stages", [None, [], {"train": {}}, {"train": [1]}])
def test_a_run_record_without_stages_is_damaged(local: Store, stages: object) -> None:
    record_run(local, "r1", {"stages": stages})
    with pytest.raises(Refused, match=r"r1\.json is damaged"):
        list(runs(local))


def test_runs_expire_after_the_retention(local: Store) -> None:
    model = make(local, "train", 1)
    use(local, "r1", model)
    assert list(collector(local, days=1).garbage()) == []
    age(local, 2 * DAY, "runs")
    assert ("train", "artifact") in kinds(collector(local, days=1).garbage())


def run_names(store: Store) -> set[str]:
    return {run.path.rpartition("/")[2] for run in runs(store)}


def test_gc_deletes_the_records_of_expired_runs(store: Store) -> None:
    for run in ("a", "b"):
        use(store, run, make(store, "train", 1))
    found = collector(store, days=-1)
    items = list(found.garbage())
    assert {item.key for item in items if item.kind == "run"} == {"a", "b"}
    assert list(found.delete(items)) == items
    assert run_names(store) == set()
    assert list(collector(store).garbage()) == []


def test_gc_keeps_the_records_of_recent_and_of_unfinished_runs(local: Store) -> None:
    use(local, "old", make(local, "train", 1))
    parts = KeyParts("train", 1, {"n": 9}, {})
    with local.lock("train", parts.key):
        record_run(local, "long", {"stages": {"train": [parts.key]}})
        age(local, 2 * DAY, "runs")
        use(local, "recent", make(local, "train", 2))
        found = collector(local, days=1)
        list(found.delete(list(found.garbage())))
    assert run_names(local) == {"long.json", "recent.json"}


def test_a_run_that_shares_a_download_with_a_recent_run_expires(local: Store) -> None:
    images = make(local, "download", 1)
    old, recent = (make(local, "train", n, images=images) for n in (1, 2))
    use(local, "a-recent", images, recent)  # is listed before or after the others
    for run in ("0-old", "b-old"):
        use(local, run, images, old)
        age(local, 2 * DAY, f"runs/{run}.json")
    marks = collector(local, days=1)._mark()
    assert {path.rpartition("/")[2] for path in marks.expired} == {"0-old.json", "b-old.json"}
    assert marks.artifacts.keys() == {("download", images.key), ("train", recent.key)}


def test_gc_keeps_the_record_of_a_run_that_continues_after_the_listing(local: Store) -> None:
    model = make(local, "train", 1)
    use(local, "a-run", model)
    age(local, 2 * DAY)
    found = collector(local, days=1)
    items = [item for item in found.garbage() if item.kind == "run"]
    use(local, "a-run", make(local, "evaluate", 1))
    assert len(items) == 1 and list(found.delete(items)) == []
    (run,) = runs(local)
    assert {stage for stage, _ in run.keys} == {"train", "evaluate"}


def test_a_changed_byte_of_a_run_record_is_damage(store: Store) -> None:
    model = make(store, "train", 1)
    use(store, "r1", model)
    path = f"{store.root}/runs/r1.json"
    other = ("0" if model.key[0] != "0" else "1") + model.key[1:]
    store.fs.pipe_file(path, store.fs.cat_file(path).replace(model.key.encode(), other.encode()))
    with pytest.raises(Refused, match=r"r1\.json is damaged"):
        collector(store)
    with pytest.raises(Refused, match=r"r1\.json is damaged"):  # its run goes no further
        use(store, "r1", model)


@pytest.mark.parametrize("kind", ["memory", *REMOTE])
def test_a_request_that_arrives_late_takes_no_stage_from_a_run_record(
    kind: str, url_of: UrlOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, requests = Store(url_of(kind)), []

    def kept(*request: Any) -> Any:
        requests.append(request)
        return swap(*request)

    monkeypatch.setattr("artifacts.gc.swap", kept)
    for stage in ("download", "encode", "train"):
        record_run(store, "r1", {"stages": {stage: [stage]}})
    assert len(requests) == 3
    for request in requests:
        swap(*request)
    (record,) = runs(store)
    assert {stage for stage, _ in record.keys} == {"download", "encode", "train"}
