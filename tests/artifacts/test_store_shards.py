"""Shards of a store: shared by artifacts, verified, and discarded once if damaged."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from store_drafts import build, flip

from artifacts import store as store_module
from artifacts.records import digest_bytes, encode_record, first_fault
from artifacts.store import KeyParts, Shard, Store


def test_shards_are_shared_and_verified(
    any_store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "x").write_bytes(b"tar bytes")
    shard = any_store.commit_shard("encode", "k1", {".tar": str(tmp_path / "x")}, {"samples": 2})
    found = any_store.shard("encode", "k1")
    assert found == shard
    one, two = (any_store.draft(KeyParts("encode", 1, {"n": n}, {})) for n in (1, 2))
    for draft in (one, two):
        draft.add_shard(shard)
    digests = {draft.commit({}, {}).digest for draft in (one, two)}
    assert len(digests) == 1
    assert any_store.find("encode", one.parts.key) is not None
    name = shard.files[0].path
    assert name == f"k1.{digest_bytes(b'tar bytes')}.tar"
    any_store.fs.pipe_file(f"{any_store.shards_path('encode')}/{name}", b"tar bytez")
    assert any_store.shard("encode", "k1") is None
    assert f"{name} is damaged" in caplog.text
    assert any_store.find("encode", one.parts.key) is None


def test_a_lock_of_a_shard_lists_few_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the locks of a stage would cost the square of its shards."""
    store, listed = Store(str(tmp_path)), []
    keys = [digest_bytes(b"%d" % number) for number in range(100)]
    for key in keys[1:]:
        with store.shard_lock("encode", key):
            pass
    found = os.listdir
    monkeypatch.setattr(
        os, "listdir", lambda folder: listed.append(len(names := found(folder))) or names
    )
    with store.shard_lock("encode", keys[0]):
        pass
    assert listed and max(listed) < 10


def test_a_shard_half_written_is_not_there(any_store: Store) -> None:
    any_store.fs.makedirs(any_store.shards_path("encode"), exist_ok=True)
    any_store.fs.pipe_file(f"{any_store.shards_path('encode')}/k2.tar", b"half")
    assert any_store.shard("encode", "k2") is None


@pytest.mark.parametrize("committed", [False, True])
def test_a_damaged_shard_is_discarded_once(
    any_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    """Another run finds the damage too, and is first, perhaps with a new shard."""
    (tmp_path / "x").write_bytes(b"tar bytes")

    def commit(by: str) -> Shard:
        return any_store.commit_shard("encode", "k", {".tar": str(tmp_path / "x")}, {"by": by})

    def other_first(*given: Any, **more: Any) -> str | None:
        fault = first_fault(*given, **more)
        with monkeypatch.context() as patch:
            patch.setattr(store_module.records, "first_fault", first_fault)
            assert any_store.shard("encode", "k", discard=True) is None
        if committed:
            commit("the other")
        return fault

    (tar,) = commit("us").files
    any_store.fs.pipe_file(f"{any_store.shards_path('encode')}/{tar.path}", b"tar bytez")
    with monkeypatch.context() as patch:
        patch.setattr(store_module.records, "first_fault", other_first)
        assert any_store.shard("encode", "k", discard=True) is None
    found = any_store.shard("encode", "k")
    assert (found and found.meta) == ({"by": "the other"} if committed else None)


@pytest.mark.parametrize("data", [b"{}", encode_record({"files": []})])
def test_a_damaged_record_of_a_shard_is_discarded(any_store: Store, data: bytes) -> None:
    path = f"{any_store.shards_path('encode')}/k.json"
    any_store.fs.makedirs(any_store.shards_path("encode"), exist_ok=True)
    any_store.fs.pipe_file(path, data)
    assert any_store.shard("encode", "k", discard=True) is None
    assert not any_store.fs.exists(path)


def test_two_builders_of_one_shard_each_record_their_own_whole_file(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    contents = [bytes([n]) * 300_000 for n in (1, 2)]
    recorded: list[tuple[str, str]] = []
    done = threading.Event()
    torn: list[int] = []

    def build_shard(n: int) -> None:
        (tmp_path / f"{n}").write_bytes(contents[n])
        for _ in range(20):
            shard = store.commit_shard("encode", "k", {".tar": str(tmp_path / f"{n}")}, {})
            recorded.append((shard.files[0].sha256, digest_bytes(contents[n])))

    def read() -> None:
        while not done.is_set():
            for path in Path(store.shards_path("encode")).glob("k.*.tar"):
                if digest_bytes(data := path.read_bytes()) not in path.name:
                    torn.append(len(data))

    reader = threading.Thread(target=read)
    builders = [threading.Thread(target=build_shard, args=(n,)) for n in (0, 1)]
    for thread in (reader, *builders):
        thread.start()
    for thread in builders:
        thread.join()
    done.set()
    reader.join()
    assert len(recorded) == 40
    assert all(found == own for found, own in recorded)
    assert torn == []
    files = {f"k.{digest_bytes(data)}.tar" for data in contents}
    assert {p.name for p in Path(store.shards_path("encode")).iterdir()} == files | {"k.json"}


def test_a_shard_that_is_built_again_changes_nothing_for_an_older_artifact(
    any_store: Store, tmp_path: Path
) -> None:
    """Downloads differ: a host has another picture at the same address today."""
    (tmp_path / "x").write_bytes(b"yesterday")
    draft = build(any_store)
    draft.add_shard(any_store.commit_shard("encode", "k", {".tar": str(tmp_path / "x")}, {}))
    older = draft.commit({}, {})
    (tmp_path / "x").write_bytes(b"today")
    newer = any_store.commit_shard("encode", "k", {".tar": str(tmp_path / "x")}, {})
    assert any_store.shard("encode", "k") == newer
    assert any_store.fault(older, deep=True) is None
    assert older.files[0].sha256 == digest_bytes(b"yesterday")


def test_a_shard_file_that_is_there_keeps_its_time_stamp(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    (tmp_path / "x").write_bytes(b"tar bytes")
    shards = [store.commit_shard("encode", "k", {".tar": str(tmp_path / "x")}, {}) for _ in "12"]
    assert shards[0] == shards[1]
    file = Path(store.shards_path("encode"), shards[0].files[0].path)
    flip(file)
    store.commit_shard("encode", "k", {".tar": str(tmp_path / "x")}, {})
    assert file.read_bytes() == b"tar bytes"
