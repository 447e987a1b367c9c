"""A collection deletes nothing that runs and builders use or change meanwhile."""

import random
import subprocess
import sys
import time
from contextlib import ExitStack
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
from gc_stores import DAY, age, collector, kinds, make, use
from store_servers import REMOTE, UrlOf

from artifacts import gc
from artifacts.compare_and_swap import read, remove, swap
from artifacts.filesystems import Clock, Entry, checksum, delete_tree, file_info, files, modified
from artifacts.gc import PAUSE, Collector, mark
from artifacts.lock import Lock, hold, read_owner
from artifacts.records import TICK
from artifacts.store import KeyParts, Store


@pytest.fixture(params=["local", *REMOTE])
def store(request: pytest.FixtureRequest, url_of: UrlOf) -> Store:
    return Store(url_of(request.param))


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
    with store.lock("train", parts.key):
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

    monkeypatch.setattr("artifacts.filesystems.delete_tree", paused)
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
            gc._write(local, f"{local.root}/runs/a-run.json", {"stages": {}})
        return refresh(self)

    def sleep(seconds: float) -> None:
        if seconds == PAUSE:
            assert read_owner(local.fs, lock) is None
            acts.append("pause")

    items = list(found.garbage())
    monkeypatch.setattr("artifacts.gc.BATCH", 1)
    monkeypatch.setattr("artifacts.gc.time.sleep", sleep)
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
    with local.lock("train", parts.key):
        local.draft(parts).write("half", b"1")
    age(local, 2 * DAY)
    found = collector(local, min_age=DAY)
    items = list(found.garbage())
    assert kinds(items) == [("train", "unfinished")]
    local.draft(parts).write("other half", b"2")
    assert list(found.delete(items)) == []
    assert local.fs.exists(f"{local.root}/train/{parts.key}/half")


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

    monkeypatch.setattr("artifacts.filesystems.modified", aged)
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
                monkeypatch.setattr("artifacts.filesystems.file_info", taken_late)
            deleted = list(found.delete(items))
            assert deleted == [] or store.is_local, "a disk's old lock is another file"
            (lock,) = locks
            lock.renew()
            lock.check()

    copy_context().run(delete)  # a builder's lock outlives the collection's, which stays held here


def test_gc_waits_a_clock_tick_between_listing_and_reading_the_runs(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a record that is written again after the reading could keep its time stamp."""
    make(local, "train", 1)
    acts = list[Any]()
    listed = Collector._run_records
    monkeypatch.setattr(Collector, "_run_records", lambda c: acts.append("list") or listed(c))
    monkeypatch.setattr("artifacts.gc.time.sleep", acts.append)
    Collector(local, lambda: acts.append("read") or mark(local, [], 30), days=30, min_age=DAY)
    assert acts == ["list", TICK, "read"]


RUN = """
import random, sys
from artifacts.gc import record_run
from artifacts.store import KeyParts
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
