"""Builders that lost their lock, were paused or killed: they change nothing of the next one's."""

from pathlib import Path
from typing import Any

import pytest
from store_drafts import PARTS, build
from store_servers import REMOTE, UrlOf

from artifacts import compare_and_swap as cas
from artifacts import store as store_module
from artifacts.lock import LockLost, seize
from artifacts.records import FileEntry, digest_bytes
from artifacts.store import Artifact, Store


def test_who_lost_the_lock_writes_and_commits_nothing_more(
    any_store: Store, tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(b"alpha")
    with any_store.lock("encode", PARTS.key) as lock:
        draft = any_store.draft(PARTS, lock)
        draft.write("a.bin", b"alpha")
        path = f"{draft.path}/lock.json"
        while cas.swap(any_store.fs, path, cas.read(any_store.fs, path), b"{}") is None:
            continue
        lock.renew()
        for act in (
            lambda: draft.write("a.bin", b"beta"),
            lambda: draft.upload(str(tmp_path / "x"), "b.bin"),
            lambda: draft.commit({}, {}),
        ):
            with pytest.raises(LockLost):
                act()
    assert any_store.fs.cat_file(f"{draft.path}/a.bin") == b"alpha"
    assert not any_store.fs.exists(f"{draft.path}/b.bin")
    assert any_store.find("encode", PARTS.key) is None


@pytest.mark.parametrize("kind", ["memory", *REMOTE])
def test_an_upload_that_arrives_late_changes_no_later_file(
    kind: str, url_of: UrlOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, requests = Store(url_of(kind)), []

    def kept(*request: Any) -> Any:
        requests.append(request)
        return cas.swap(*request)

    monkeypatch.setattr("artifacts.lock.swap", kept)
    for data in (b"alpha", b"beta"):
        (tmp_path / "x").write_bytes(data)
        with store.lock("encode", PARTS.key) as lock:
            draft = store.draft(PARTS, lock)
            draft.upload(str(tmp_path / "x"), "b.bin")
    sent = [request for request in requests if request[1].endswith("/b.bin")]
    assert len(sent) == 2
    for request in sent:
        cas.swap(*request)
    assert store.fs.cat_file(f"{draft.path}/b.bin") == b"beta"


def test_who_is_paused_just_before_its_commit_does_not_replace_another_builders(
    any_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs: list[Artifact] = []

    def paused(*given: Any) -> bool:
        if not theirs:  # another takes the lock over and commits
            monkeypatch.setattr(store_module, "create", cas.create)
            path = f"{any_store.root}/encode/{PARTS.key}/lock.json"
            while cas.swap(any_store.fs, path, cas.read(any_store.fs, path), b"null") is None:
                continue
            with any_store.lock("encode", PARTS.key) as lock:
                theirs.append(build(any_store, PARTS, lock).commit({"by": "them"}, {}))
        return cas.create(*given)

    with any_store.lock("encode", PARTS.key) as lock:
        draft = build(any_store, PARTS, lock)
        monkeypatch.setattr(store_module, "create", paused)
        with pytest.raises(LockLost):
            draft.commit({"by": "us"}, {})
    found = any_store.find("encode", PARTS.key)
    assert found is not None and found.summary == {"by": "them"}


def test_a_damaged_manifest_is_replaced_by_its_rebuilder(any_store: Store) -> None:
    artifact = build(any_store).commit({}, {})
    any_store.fs.pipe_file(f"{artifact.path}/manifest.json", b"{")
    with any_store.lock("encode", PARTS.key) as lock:
        build(any_store, PARTS, lock).commit({}, {})
    assert any_store.find("encode", PARTS.key) is not None


def test_a_killed_rebuild_leaves_no_manifest_of_older_files(any_store: Store) -> None:
    """A manifest whose files are newer would be neither wholly there nor away."""
    artifact = build(any_store).commit({}, {})
    any_store.fs.pipe_file(f"{artifact.path}/sub/b.bin", b"bete")
    with any_store.lock("encode", PARTS.key) as lock:
        draft = any_store.draft(PARTS, lock)
        draft.discard_damaged()
        draft.write("a.bin", b"of a rebuild that is killed here")
    assert any_store.load("encode", PARTS.key) is None
    with any_store.lock("encode", PARTS.key) as lock:
        draft = build(any_store, PARTS, lock)
        draft.discard_damaged()
        draft.commit({}, {})
    assert any_store.find("encode", PARTS.key) is not None


def test_a_paused_discard_deletes_no_manifest_of_another_builder(
    any_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = build(any_store).commit({}, {})
    any_store.fs.pipe_file(f"{damaged.path}/a.bin", b"alpho")

    def paused(*given: Any) -> bytes | None:  # another takes the lock over and rebuilds
        monkeypatch.setattr(cas, "remove", remove)
        path = f"{any_store.root}/encode/{PARTS.key}/lock.json"
        while cas.swap(any_store.fs, path, cas.read(any_store.fs, path), b"null") is None:
            continue
        with any_store.lock("encode", PARTS.key) as lock:
            draft = any_store.draft(PARTS, lock)
            draft.discard_damaged()
            build(any_store, PARTS, lock).commit({"by": "them"}, {})
        taken.append(True)
        return remove(*given)

    remove, taken = cas.remove, list[bool]()
    monkeypatch.setattr(cas, "remove", paused)
    with any_store.lock("encode", PARTS.key) as lock:
        monkeypatch.setattr(lock, "_lease", -1.0)  # as after a long pause: the store is asked
        with pytest.raises(LockLost):
            any_store.draft(PARTS, lock).discard_damaged()
    found = any_store.find("encode", PARTS.key)
    assert taken and found is not None and found.summary == {"by": "them"}


def test_a_file_of_the_next_builder_is_no_damage(any_store: Store) -> None:
    fs, path = any_store.fs, f"{any_store.root}/encode/{PARTS.key}/lock.json"
    with any_store.lock("encode", PARTS.key) as paused:
        draft = build(any_store, lock=paused)
        with seize(fs, path, cas.read(fs, path)):
            fs.pipe_file(f"{draft.path}/d.bin", b"other")
            with pytest.raises(LockLost):
                draft.add(FileEntry("d.bin", 5, digest_bytes(b"delta")))
