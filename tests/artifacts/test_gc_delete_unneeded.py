"""Garbage is what no published model, recent run or living builder needs, and nothing else."""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
from store_servers import REMOTE, UrlOf

from artifacts import run_records
from artifacts.artifact_key import KeyParts
from artifacts.clock import Clock
from artifacts.compare_and_swap import read, remove, swap
from artifacts.delete_and_fetch_folders import delete_tree
from artifacts.file_stamps import TICK
from artifacts.gc_delete_unneeded import PAUSE, Collector, Garbage
from artifacts.gc_find_needed import Marks, mark, needed_by
from artifacts.list_folder import Entry, checksum, files, modified
from artifacts.lock import Lock, hold, read_owner
from artifacts.remote_client_options_and_errors import file_info
from artifacts.run_records import GarbageUnsure, record_run, runs
from artifacts.store import Artifact, Store

DAY = 86400.0


@pytest.fixture(params=["local", *REMOTE])
def store(request: pytest.FixtureRequest, url_of: UrlOf) -> Store:
    return Store(url_of(request.param))


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


def make(store: Store, stage: str, n: int, **parents: Artifact) -> Artifact:
    draft = store.draft(KeyParts(stage, 1, {"n": n}, {k: a.digest for k, a in parents.items()}))
    draft.write("data", f"{stage} {n}".encode())
    with tempfile.NamedTemporaryFile() as source:
        source.write(b"x" * n)
        source.flush()
        draft.add_shard(store.commit_shard(stage, f"shard{n}", {".tar": source.name}, {}))
    known = {name: {"stage": a.stage, "key": a.key} for name, a in parents.items()}
    return draft.commit({}, {"parents": known})


def use(store: Store, run: str, *artifacts: Artifact) -> None:
    """What a run does before it looks for an artifact."""
    record_run(store, run, {"stages": {a.stage: [a.key] for a in artifacts}})


def collector(store: Store, *needed: Artifact, days: float = 30, min_age: float = 0) -> Collector:
    def marked() -> Marks:
        found = mark(store, [], days)
        return Marks(
            found.artifacts | needed_by(store, [(a.stage, a.key) for a in needed]),
            found.unfinished,
            found.expired,
        )

    return Collector(store, marked, days=days, min_age=min_age)


def kinds(items: Any) -> list[tuple[str, str]]:
    return sorted((item.stage, item.kind) for item in items)


def age(store: Store, seconds: float, path: str = "") -> None:
    """Make everything in a local store, or a folder or a file of it, older."""
    top = Path(store.root, path)
    for file in [top] if top.is_file() else top.rglob("*"):
        at = file.lstat().st_mtime - seconds
        os.utime(file, (at, at), follow_symlinks=False)


def test_only_unreferenced_artifacts_are_garbage(store: Store) -> None:
    images, images2 = make(store, "download", 1), make(store, "download", 2)
    model = make(store, "train", 1, images=images)
    make(store, "train", 2, images=images2)
    use(store, "a-run", model)
    found = collector(store)
    items = list(found.garbage())
    assert kinds(items) == [
        ("download", "artifact"),
        ("download", "shard"),
        ("train", "artifact"),
        ("train", "shard"),
    ]
    assert list(found.delete(items)) == items
    assert store.find("train", model.key) is not None
    assert store.find("download", images.key) is not None
    assert [a.key for a in store.artifacts()] == [images.key, model.key]
    assert store.shard("download", "shard2") is None
    assert store.shard("download", "shard1") is not None
    assert list(collector(store).garbage()) == []


@pytest.mark.parametrize("kind", REMOTE)
def test_gc_deletes_nothing_of_a_store_that_its_own_url_matches_as_a_pattern(
    kind: str, url_of: UrlOf
) -> None:
    url = url_of(kind)
    beside, own = Store(f"{url}/run1"), Store(f"{url}/run[1]")
    for store in (beside, own):
        make(store, "train", 1)
    found = collector(own)
    assert len(list(found.delete(list(found.garbage())))) == 2
    assert list(files(own.fs, f"{own.root}/train/shards")) == []
    (kept,) = beside.artifacts()
    assert beside.fault(kept, deep=True) is None


def test_gc_keeps_what_a_live_builder_works_on(store: Store) -> None:
    parts = KeyParts("train", 1, {}, {})
    with store.lock("train", parts.key):
        store.draft(parts).write("half", b"1")
        assert list(collector(store).garbage()) == []
    assert kinds(collector(store).garbage()) == [("train", "unfinished")]


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


def test_gc_keeps_unfinished_artifacts_of_recent_runs_and_their_shards(
    store: Store,
) -> None:
    old = make(store, "download", 1)
    parts = KeyParts("download", 1, {}, {})
    record_run(store, "a-run", {"stages": {"download": [parts.key]}})
    store.draft(parts).write("half", b"1")
    found = collector(store)
    assert kinds(found.delete(list(found.garbage()))) == [("download", "artifact")]
    assert store.find("download", old.key) is None
    assert store.shard("download", "shard1") is not None


def test_gc_keeps_the_inputs_of_a_run_longer_than_the_retention(
    local: Store,
) -> None:
    images = make(local, "download", 1)
    parts = KeyParts("train", 1, {}, {})
    use(local, "a-run", images)
    record_run(local, "a-run", {"stages": {"train": [parts.key]}})
    age(local, 40 * DAY)
    with local.lock("train", parts.key):
        assert list(collector(local).garbage()) == []
    assert ("download", "artifact") in kinds(collector(local).garbage())


def test_gc_deletes_checkpoints_of_finished_training(
    store: Store,
) -> None:
    model = make(store, "train", 1)
    store.fs.makedirs(f"{model.path}/checkpoints", exist_ok=True)
    store.fs.pipe_file(f"{model.path}/checkpoints/step-1", b"12345")
    found = collector(store, model)
    items = list(found.garbage())
    assert [(item.kind, item.size) for item in items] == [("checkpoints", 5)]
    with store.lock("train", model.key):
        assert list(found.delete(items)) == []
    assert list(found.delete(items)) == items
    assert store.find("train", model.key) is not None
    assert not store.fs.exists(f"{model.path}/checkpoints")


def test_gc_keeps_an_artifact_whose_build_began_after_the_listing(store: Store) -> None:
    model, other = make(store, "train", 1), make(store, "train", 2)
    found = collector(store)
    items = list(found.garbage())
    with store.lock("train", model.key):
        list(found.delete(items))
    assert store.find("train", model.key) is not None
    assert store.find("train", other.key) is None
    assert store.shard("train", "shard2") is not None  # the builder may name it


def test_gc_keeps_an_artifact_reused_after_the_listing(store: Store) -> None:
    images = make(store, "download", 1)
    model = make(store, "train", 1, images=images)
    found = collector(store)
    items = list(found.garbage())
    assert len(items) == 4
    use(store, "later", model)
    assert list(found.delete(items)) == []
    assert store.find("train", model.key) is not None
    assert store.find("download", images.key) is not None
    assert store.shard("download", "shard1") is not None


def test_gc_never_hides_an_artifact_that_was_reused_before_its_turn(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(local, "train", 1)
    found = collector(local)
    items = [item for item in found.garbage() if item.kind == "artifact"]
    use(local, "later", model)
    removed: list[str] = []

    def recorded(fs: Any, path: str) -> bytes | None:
        removed.append(path)
        return remove(fs, path)

    monkeypatch.setattr("artifacts.compare_and_swap.remove", recorded)
    assert len(items) == 1 and list(found.delete(items)) == []
    assert removed == []


def test_a_gc_paused_between_two_files_keeps_the_second_of_a_builder(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = KeyParts("train", 1, {}, {})
    for path in ("a", "b"):
        store.draft(parts).write(path, b"1")
    found = collector(store)
    (item,) = list(found.garbage())
    monkeypatch.setattr("artifacts.lock.EXPIRY_SECONDS", 0.0)
    deleted = list[str]()

    def paused(fs: Any, path: str) -> None:
        delete_tree(fs, path)
        deleted.append(path)
        lock = f"{store.root}/train/{parts.key}/lock.json"
        swap(store.fs, lock, read(store.fs, lock), b'{"token": "of a builder"}')

    monkeypatch.setattr("artifacts.gc_delete_unneeded.delete_tree", paused)
    assert list(found.delete([item])) == []
    assert len(deleted) == 1


def test_runs_do_not_wait_for_the_reader_of_the_list_of_deletions(store: Store) -> None:
    make(store, "train", 1)
    found = collector(store)
    for _ in found.delete(list(found.garbage())):  # otherwise it never ends
        use(store, "later", make(store, "encode", 1))


@pytest.mark.parametrize("batch", [1, 2], ids=["under the lock", "after it"])
def test_a_run_waits_for_one_batch_of_deletions(
    local: Store, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """A run that waits looks at the lock twice a second, and a batch follows after milliseconds."""
    for n in (1, 2):
        make(local, "train", n)
    found, lock, refresh = collector(local), f"{local.root}/gc.lock", Collector._refresh
    acts = list[Any]()

    def recorded(self: Collector) -> bool:
        is_held = read_owner(local.fs, lock) is not None
        acts.append("batch" if is_held else "look")
        if acts.count("batch") == 1 and acts[-1] == ("batch" if batch == 1 else "look"):
            run_records._write(local, f"{local.root}/runs/a-run.json", {"stages": {}})
        return refresh(self)

    def sleep(seconds: float) -> None:
        if seconds == PAUSE:
            assert read_owner(local.fs, lock) is None
            acts.append("pause")

    items = list(found.garbage())
    monkeypatch.setattr("artifacts.gc_delete_unneeded.BATCH", 1)
    monkeypatch.setattr("artifacts.gc_delete_unneeded.time.sleep", sleep)
    monkeypatch.setattr(Collector, "_refresh", recorded)
    assert list(found.delete(items[:3])) == items[:3]
    assert acts == ["look", "batch", "look", "pause", "batch", "look", "batch"]


def test_a_paused_gc_restores_the_record_that_a_run_found(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was paused for longer than its lock lives, just before the removal of the record."""
    model, jump, collection = make(store, "train", 1), [0.0], f"{store.root}/gc.lock"

    def paused(fs: Any, path: str) -> bytes | None:
        swap(fs, collection, read(fs, collection), b'{"token": "of a run"}')
        jump[0] = 1000.0
        return remove(fs, path)

    clock = Clock(now=lambda: time.monotonic() + jump[0])
    monkeypatch.setitem(hold.__wrapped__.__kwdefaults__, "clock", clock)  # type: ignore[attr-defined]
    found = collector(store)
    items = list(found.garbage())
    monkeypatch.setattr("artifacts.compare_and_swap.remove", paused)
    assert list(found.delete(items)) == []
    assert store.find("train", model.key) is not None
    assert store.shard("train", "shard1") is not None


def test_gc_keeps_the_shards_of_an_artifact_built_after_the_listing(
    store: Store, tmp_path: Path
) -> None:
    make(store, "train", 1)
    (tmp_path / "shard").write_bytes(b"a shard")
    shard = store.commit_shard("train", "a-shard", {".tar": str(tmp_path / "shard")}, {})
    found = collector(store)
    items = list(found.garbage())
    draft = store.draft(KeyParts("train", 1, {"n": 2}, {}))
    draft.add_shard(shard)
    use(store, "later", draft.commit({}, {}))
    assert kinds(found.delete(items)) == [("train", "artifact")]
    assert store.shard("train", "a-shard") == shard


def test_gc_keeps_the_shards_of_a_stage_whose_artifact_is_being_rebuilt(
    store: Store, tmp_path: Path
) -> None:
    damaged = make(store, "train", 1)
    (tmp_path / "shard").write_bytes(b"a shard")
    store.commit_shard("train", "a-shard", {".tar": str(tmp_path / "shard")}, {})
    assert kinds(collector(store, damaged).garbage()) == [("train", "shard")]
    with store.lock("train", damaged.key):
        assert list(collector(store, damaged).garbage()) == []


def test_a_paused_gc_deletes_nothing_of_a_builder_that_took_its_lock(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(store, "train", 1)
    found = collector(store)
    items = [item for item in found.garbage() if item.kind == "artifact"]
    monkeypatch.setattr("artifacts.lock.EXPIRY_SECONDS", 0.0)

    def paused(fs: Any, path: str) -> bytes | None:
        data, lock = remove(fs, path), f"{model.path}/lock.json"
        swap(fs, lock, read(fs, lock), b'{"token": "of a builder"}')
        make(store, "train", 1)
        return data

    monkeypatch.setattr("artifacts.compare_and_swap.remove", paused)
    assert list(found.delete(items)) == []
    assert store.find("train", model.key) is not None


def test_gc_keeps_what_changed_after_the_listing(local: Store) -> None:
    parts = KeyParts("train", 1, {}, {})
    local.draft(parts).write("half", b"1")
    age(local, 2 * DAY)
    found = collector(local, min_age=DAY)
    items = list(found.garbage())
    assert kinds(items) == [("train", "unfinished")]
    local.draft(parts).write("other half", b"2")
    assert list(found.delete(items)) == []
    assert local.fs.exists(f"{local.root}/train/{parts.key}/half")


def test_gc_keeps_artifacts_younger_than_a_day_and_their_shards(local: Store) -> None:
    old, young = make(local, "train", 1), make(local, "train", 2)
    age(local, 2 * DAY)
    Path(young.path, "data").touch()
    found = collector(local, min_age=DAY)
    assert kinds(found.delete(list(found.garbage()))) == [("train", "artifact"), ("train", "shard")]
    assert local.find("train", old.key) is None
    assert local.find("train", young.key) is not None


def test_gc_deletes_an_old_shard_file_with_its_last_artifact(store: Store, tmp_path: Path) -> None:
    older = make(store, "download", 1)
    (tmp_path / "again").write_bytes(b"downloaded again")
    newer = store.commit_shard("download", "shard1", {".tar": str(tmp_path / "again")}, {})
    assert list(collector(store, older).garbage()) == []
    draft = store.draft(KeyParts("download", 1, {}, {}))
    draft.add_shard(newer)
    artifact = draft.commit({}, {})
    found = collector(store, artifact)
    list(found.delete(list(found.garbage())))
    assert store.find("download", older.key) is None
    assert store.find("download", artifact.key) is not None
    assert store.shard("download", "shard1") == newer
    assert len(store.fs.ls(store.shards_path("download"))) == 2


def test_gc_deletes_temporary_files_of_killed_processes(local: Store) -> None:
    model = make(local, "train", 1)
    for path in (
        "train/shards/shard1.tar.0123.tmp",
        "train/shards/shard9.abc.tar",  # whose record was never written
        f"train/{model.key}/data.0123.tmp",
        "train/locks/sha/shard9.json.3",
        "runs/a-run.json.0123.tmp",
        "registry/digits/champion.0123.tmp",
        ".probe-0123",
    ):
        local.fs.makedirs(str(Path(local.root, path).parent), exist_ok=True)
        local.fs.pipe_file(f"{local.root}/{path}", b"x")
    age(local, 2 * DAY)
    found = collector(local, model, min_age=DAY)
    removed = list(found.delete(list(found.garbage())))
    assert sorted(item.kind for item in removed) == ["leftover"] * 6 + ["shard"]
    left = {str(p.relative_to(local.root)) for p in Path(local.root).rglob("*") if p.is_file()}
    assert {path for path in left if "0123" in path or "shard9" in path} == set()
    assert local.find("train", model.key) is not None


def test_gc_keeps_the_lock_of_a_shard_that_is_being_built(local: Store) -> None:
    model = make(local, "train", 1)
    with local.shard_lock("train", "shard9") as lock:
        age(local, 2 * DAY)
        lock.renew()
        found = collector(local, model, min_age=DAY)
        assert list(found.delete(list(found.garbage()))) == []
        lock.renew()
        lock.check()


@pytest.mark.parametrize("taken", ["before the deletion", "after its age was asked"])
def test_gc_keeps_an_old_lock_of_a_shard_that_a_builder_takes(
    store: Store, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a bucket, it is the same file."""
    model = make(store, "train", 1)
    with store.shard_lock("train", "shard9"):
        pass
    (left,) = files(store.fs, f"{store.root}/train/locks")
    known = checksum(left) or left["name"]

    def aged(entry: Entry) -> float:
        return modified(entry) - (2 * DAY if known in (checksum(entry), entry["name"]) else 0)

    monkeypatch.setattr("artifacts.gc_delete_unneeded.modified", aged)
    found, locks, held = collector(store, model, min_age=DAY), list[Lock](), ExitStack()
    items = list(found.garbage())
    assert kinds(items) == [("train", "leftover")]

    def taken_late(fs: Any, path: str) -> Any:
        info = file_info(fs, path)
        locks.append(held.enter_context(store.shard_lock("train", "shard9")))
        return info

    def delete() -> None:
        with held:
            if taken == "before the deletion":
                locks.append(held.enter_context(store.shard_lock("train", "shard9")))
            else:
                monkeypatch.setattr("artifacts.gc_delete_unneeded.file_info", taken_late)
            deleted = list(found.delete(items))
            assert deleted == [] or store.is_local, "a disk's old lock is another file"
            (lock,) = locks
            lock.renew()
            lock.check()

    copy_context().run(delete)  # a builder's lock outlives the collection's, which stays held here


def test_gc_deletes_an_old_lock_of_a_shard(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(store, "train", 1)
    with store.shard_lock("train", "shard9"):
        pass
    present = time.time() + 2 * DAY
    monkeypatch.setattr("artifacts.gc_delete_unneeded.present_time", lambda *_: present)
    found = collector(store, model, min_age=3 * DAY)
    assert kinds(found.delete(list(found.garbage()))) == [("train", "leftover")]
    assert list(files(store.fs, f"{store.root}/train/locks")) == []


def test_gc_deletes_unused_compiled_programs_and_staged_models(
    local: Store,
) -> None:
    for name in ("old", "new"):
        place = Path(local.root, "compiled/xla-2", name)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"program")
    keys = {name: digit * 64 for name, digit in {"old": "1", "new": "2", "half": "3"}.items()}
    for name, key in keys.items():
        Path(local.root, "models", key).mkdir(parents=True)
        Path(local.root, "models", key, "weights").write_bytes(b"12")
        if name != "half":  # killed while it was being copied
            Path(local.root, "models", f"{key}.json").write_bytes(b"{}")
    age(local, 2 * DAY)
    age(local, 40 * DAY, f"models/{keys['old']}")
    for old in (f"models/{keys['old']}.json", "compiled/xla-2/old"):
        at = time.time() - 40 * DAY
        os.utime(Path(local.root, old), (at, at))
    found = collector(local, min_age=DAY)
    removed = list(found.delete(list(found.garbage())))
    assert sorted((i.kind, i.key[:3]) for i in removed) == [
        ("compiled", "old"),
        ("model", "111"),
        ("model", "333"),
    ]
    assert sorted(os.listdir(Path(local.root, "models"))) == [keys["new"], f"{keys['new']}.json"]
    assert os.listdir(Path(local.root, "compiled/xla-2")) == ["new"]


def test_gc_keeps_staged_models_during_a_build(local: Store) -> None:
    Path(local.root, "models", "1" * 64).mkdir(parents=True)
    Path(local.root, "models", "1" * 64, "weights").write_bytes(b"12")
    Path(local.root, "models", f"{'1' * 64}.json").write_bytes(b"{}")
    age(local, 40 * DAY)
    found = collector(local, min_age=DAY)
    items = list(found.garbage())
    assert [item.kind for item in items] == ["model"]
    with local.lock("train", "2" * 64):
        assert list(collector(local, min_age=DAY).garbage()) == []
        record_run(local, "a-run", {"stages": {"train": ["2" * 64]}})
        assert list(found.delete(items)) == []
    assert Path(local.root, "models", f"{'1' * 64}.json").exists()


@pytest.mark.parametrize(("stage", "deleted"), [("publish", True), ("train", False)])
def test_a_rejected_run_keeps_no_staged_model(local: Store, stage: str, deleted: bool) -> None:
    """Its publication stays unfinished; an unfinished training may still need the model."""
    Path(local.root, "models", "1" * 64).mkdir(parents=True)
    Path(local.root, "models", f"{'1' * 64}.json").write_bytes(b"{}")
    age(local, 40 * DAY)
    record_run(local, "rejected", {"stages": {stage: ["2" * 64]}})
    found = collector(local, min_age=DAY)
    kept = [item.kind for item in found.delete(list(found.garbage()))]
    assert kept == (["model"] if deleted else [])


@pytest.mark.parametrize("stages", [None, [], {"train": {}}, {"train": [1]}])
def test_a_run_record_without_stages_is_damaged(local: Store, stages: object) -> None:
    record_run(local, "r1", {"stages": stages})
    with pytest.raises(GarbageUnsure, match=r"r1\.json is damaged"):
        list(runs(local))


def test_gc_deletes_nothing_if_a_record_is_damaged(local: Store) -> None:
    model = make(local, "train", 1)
    local.fs.pipe_file(f"{model.path}/manifest.json", b"{")
    with pytest.raises(GarbageUnsure, match="rebuild it first"):
        needed_by(local, [("train", model.key)])
    with pytest.raises(GarbageUnsure, match="its shards are unknown"):
        list(collector(local, min_age=DAY).garbage())
    record_run(local, "r1", {"stages": {}})
    local.fs.pipe_file(f"{local.root}/runs/r1.json", b"{")
    with pytest.raises(GarbageUnsure, match="damaged"):
        collector(local)


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


def test_a_published_model_keeps_its_lineage_without_its_run(local: Store) -> None:
    images = make(local, "download", 1)
    model = make(local, "train", 1, images=images)
    published = make(local, "publish", 1, model=model)
    use(local, "a-run", images, model, published)
    age(local, 2 * DAY)

    def marked() -> Marks:
        return mark(local, [published.manifest], days=1)

    found = Collector(local, marked, days=1, min_age=0)
    assert kinds(found.delete(list(found.garbage()))) == [("runs", "run")]
    again = Collector(local, marked, days=1, min_age=0)
    assert list(again.garbage()) == []
    assert {a.stage for a in local.artifacts()} == {"download", "train", "publish"}


@pytest.mark.parametrize("call", ["scandir", "stat", "lstat", "open"])
def test_an_io_error_ends_gc_with_nothing_deleted(
    local: Store, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A flaky disk: each call of a kind fails once, in turn."""
    model = make(local, "train", 1)
    use(local, "a-run", model)
    make(local, "train", 2)
    where: Any = __import__("builtins") if call == "open" else os
    really = getattr(where, call)
    calls = 0

    def flaky(fail: int) -> Callable[..., Any]:
        def act(*given: Any, **more: Any) -> Any:
            nonlocal calls
            if str(local.root) in str(getattr(given[0], "path", given[0])):
                calls += 1
                if calls == fail:
                    raise OSError(5, "Input/output error")
            return really(*given, **more)

        return act

    for fail in range(1, 400):
        calls = 0
        with monkeypatch.context() as patch:
            patch.setattr(where, call, flaky(fail))
            try:
                items: list[Garbage] = list(collector(local).garbage())
            except (OSError, GarbageUnsure):
                continue
        assert kinds(items) == [("train", "artifact"), ("train", "shard")]
        if calls < fail:
            break
    else:
        pytest.fail("it never ends")
    assert fail > 3 or call == "lstat"


def test_gc_waits_a_clock_tick_between_listing_and_reading_the_runs(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a record that is written again after the reading could keep its time stamp."""
    make(local, "train", 1)
    acts = list[Any]()
    listed = Collector._run_records
    monkeypatch.setattr(Collector, "_run_records", lambda c: acts.append("list") or listed(c))
    monkeypatch.setattr("artifacts.gc_delete_unneeded.time.sleep", acts.append)
    Collector(local, lambda: acts.append("read") or mark(local, [], 30))
    assert acts == ["list", TICK, "read"]


RUN = """
import random, sys
from artifacts.run_records import record_run
from artifacts.artifact_key import KeyParts
from artifacts.store import Store
store, chance, number = Store(sys.argv[1]), random.Random(int(sys.argv[2])), 0
print("ready", flush=True)
while number < int(sys.argv[3]):
    parts = KeyParts("train", 1, {"n": chance.randrange(4)}, {})
    record_run(store, sys.argv[2], {"stages": {"train": [parts.key]}})
    if store.find("train", parts.key) is None:
        with store.lock("train", parts.key) as lock:
            if store.find("train", parts.key) is None:
                draft = store.draft(parts, lock)
                draft.write("data", b"1")
                draft.commit({}, {})
    assert store.find("train", parts.key) is not None, number
    number += 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("turns", [30, pytest.param(1000, marks=pytest.mark.soak)])
def test_concurrent_runs_and_collections_lose_nothing(
    local: Store, turns: int, chance: random.Random
) -> None:
    seed = chance.randrange(10**6)
    command = [sys.executable, "-c", RUN, local.root]
    make(local, "train", 99)
    started = [
        subprocess.Popen([*command, str(seed + n), str(turns)], stdout=subprocess.PIPE)
        for n in range(2)
    ]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    deleted = 0
    while any(process.poll() is None for process in started):
        found = collector(local)
        deleted += len(list(found.delete(list(found.garbage()))))
    assert [process.wait() for process in started] == [0, 0], seed
    assert deleted


def test_a_changed_byte_of_a_run_record_is_damage(store: Store) -> None:
    model = make(store, "train", 1)
    use(store, "r1", model)
    path = f"{store.root}/runs/r1.json"
    other = ("0" if model.key[0] != "0" else "1") + model.key[1:]
    store.fs.pipe_file(path, store.fs.cat_file(path).replace(model.key.encode(), other.encode()))
    with pytest.raises(GarbageUnsure, match=r"r1\.json is damaged"):
        collector(store)
    with pytest.raises(GarbageUnsure, match=r"r1\.json is damaged"):  # its run goes no further
        use(store, "r1", model)


@pytest.mark.parametrize("kind", ["memory", *REMOTE])
def test_a_request_that_arrives_late_takes_no_stage_from_a_run_record(
    kind: str, url_of: UrlOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, requests = Store(url_of(kind)), []

    def kept(*request: Any) -> Any:
        requests.append(request)
        return swap(*request)

    monkeypatch.setattr("artifacts.run_records.swap", kept)
    for stage in ("download", "encode", "train"):
        record_run(store, "r1", {"stages": {stage: [stage]}})
    assert len(requests) == 3
    for request in requests:
        swap(*request)
    (record,) = runs(store)
    assert {stage for stage, _ in record.keys} == {"download", "encode", "train"}
