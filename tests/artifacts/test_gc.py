"""Garbage is what no published model and no recent run needs, and nothing else."""

import tempfile
from pathlib import Path

import pytest
from stores import REMOTE, UrlOf

from artifacts import gc
from artifacts.store import Artifact, KeyParts, Store


@pytest.fixture(params=["local", *REMOTE])
def store(request: pytest.FixtureRequest, url_of: UrlOf) -> Store:
    return Store(url_of(request.param))


def make(store: Store, stage: str, n: int, **parents: Artifact) -> Artifact:
    draft = store.draft(KeyParts(stage, 1, {"n": n}, {k: a.digest for k, a in parents.items()}))
    draft.write("data", f"{stage} {n}".encode())
    with tempfile.NamedTemporaryFile() as source:
        source.write(b"x" * n)
        source.flush()
        draft.add_shard(store.commit_shard(stage, f"shard{n}", {".tar": source.name}, {}))
    known = {name: {"stage": a.stage, "key": a.key} for name, a in parents.items()}
    return draft.commit({}, {"parents": known})


def test_only_what_nothing_needs_is_garbage(store: Store) -> None:
    images, images2 = make(store, "download", 1), make(store, "download", 2)
    model = make(store, "train", 1, images=images)
    make(store, "train", 2, images=images2)
    keep = gc.needed_by(store, [("train", model.key)])
    assert set(keep) == {("train", model.key), ("download", images.key)}
    items = gc.garbage(store, keep)
    assert sorted((i.stage, i.what) for i in items) == [
        ("download", "artifact"),
        ("download", "shard"),
        ("train", "artifact"),
        ("train", "shard"),
    ]
    gc.delete(store, items)
    assert store.find("train", model.key) is not None
    assert store.find("download", images.key) is not None
    assert [a.key for a in store.artifacts()] == [images.key, model.key]
    assert store.shard("download", "shard2") is None
    assert gc.garbage(store, keep) == []


def test_what_a_living_builder_is_at_stays(store: Store) -> None:
    parts = KeyParts("train", 1, {}, {})
    with store.lock("train", parts.key, on_wait=lambda owner: None):
        store.draft(parts).write("half", b"1")
        assert gc.garbage(store, {}) == []
    assert [i.what for i in gc.garbage(store, {})] == ["unfinished"]


def test_what_a_run_needs_adds_up(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for stage in ("download", "encode"):
        gc.record_run(store, "a-run", {"stages": {stage: {"key": stage}}})
    (run,) = gc.recent_runs(store, days=1)
    assert run["stages"] == {"download": {"key": "download"}, "encode": {"key": "encode"}}


def test_what_a_recent_run_has_begun_stays(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    parts = KeyParts("train", 1, {}, {})
    store.draft(parts).write("checkpoints/step-1/manifest.json", b"{}")
    assert gc.garbage(store, {}, wanted=[("train", parts.key)]) == []


def test_checkpoints_go_once_their_training_is_finished_and_nobody_is_at_it(
    store: Store,
) -> None:
    model = make(store, "train", 1)
    store.fs.makedirs(f"{model.path}/checkpoints", exist_ok=True)
    store.fs.pipe_file(f"{model.path}/checkpoints/step-1", b"12345")
    keep = gc.needed_by(store, [("train", model.key)])
    with store.lock("train", model.key, on_wait=lambda owner: None):
        assert gc.garbage(store, keep) == []
    assert [(i.what, i.size > 0) for i in gc.garbage(store, keep)] == [("checkpoints", True)]
    gc.delete(store, gc.garbage(store, keep))
    assert store.find("train", model.key) is not None
    assert not store.fs.exists(f"{model.path}/checkpoints")


def test_what_somebody_began_to_build_after_it_was_listed_stays(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    model, other = make(store, "train", 1), make(store, "train", 2)
    items = gc.garbage(store, {})
    assert {i.what for i in items} == {"artifact", "shard"}
    with store.lock("train", model.key, on_wait=lambda owner: None):
        gc.delete(store, items)
    assert store.find("train", model.key) is not None
    assert store.find("train", other.key) is None
    assert store.shard("train", "shard2") is not None  # the builder may name it


@pytest.mark.parametrize("stages", [None, [], {"train": {}}, {"train": {"key": 1}}])
def test_a_run_that_does_not_say_what_it_needs_is_damaged(tmp_path: Path, stages: object) -> None:
    store = Store(str(tmp_path))
    gc.record_run(store, "r1", {"stages": stages})
    with pytest.raises(gc.GarbageUnsure, match=r"r1\.json is damaged"):
        list(gc.recent_runs(store, days=1))


def test_nothing_is_deleted_when_a_damaged_file_hides_what_is_needed(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    model = make(store, "train", 1)
    store.fs.pipe_file(f"{model.path}/manifest.json", b"{")
    with pytest.raises(gc.GarbageUnsure, match="rebuild it first"):
        gc.needed_by(store, [("train", model.key)])
    gc.record_run(store, "r1", {"stages": {}})
    store.fs.pipe_file(f"{store.root}/runs/r1.json", b"{")
    with pytest.raises(gc.GarbageUnsure, match="damaged"):
        list(gc.recent_runs(store, days=1))


def test_runs_are_remembered_for_a_while(store: Store) -> None:
    gc.record_run(store, "r1", {"stages": {}})
    assert len(list(gc.recent_runs(store, days=1))) == 1
    assert list(gc.recent_runs(store, days=-1)) == []
