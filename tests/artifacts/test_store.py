"""An artifact exists exactly when its manifest does, while its bytes are what they were."""

import logging
import os
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pytest
from gcs_server import GcsServer
from store_servers import REMOTE, RequestsTo, S3Server, UrlOf

from artifacts import checksummed_files
from artifacts import compare_and_swap as cas
from artifacts import store as store_module
from artifacts.artifact_key import KeyParts
from artifacts.checksummed_files import Damaged, FileEntry, encode_record, first_fault
from artifacts.file_stamps import TICK
from artifacts.hashing import digest_bytes
from artifacts.list_folder import files, name_of, subfolders
from artifacts.lock import Lock, LockLost, seize
from artifacts.store import Artifact, Draft, Shard, Store, StoreError

PARTS = KeyParts("encode", 1, {"resolution": 32}, {"images": "abc"})


def build(store: Store, parts: KeyParts = PARTS, lock: Lock | None = None) -> Draft:
    draft = store.draft(parts, lock)
    draft.write("a.bin", b"alpha")
    draft.write("sub/b.bin", b"beta", rows=3)
    return draft


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, url_of: UrlOf) -> Store:
    return Store(url_of(request.param))


@pytest.fixture(params=["local", "memory", *REMOTE])
def any_store(request: pytest.FixtureRequest, url_of: UrlOf) -> Store:
    return Store(url_of(request.param))


def elsewhere(store: Store) -> Store:
    """The same store, by a client that knows nothing of what ours has seen: another machine's."""
    other = Store(store.url)
    other.fs = type(store.fs)(**store.fs.storage_options, skip_instance_cache=True)
    return other


def test_an_artifact_is_there_only_after_commit(any_store: Store) -> None:
    draft = build(any_store)
    assert any_store.find("encode", PARTS.key) is None
    artifact = draft.commit({"n": 1}, {"seconds": 0.1})
    found = any_store.find("encode", PARTS.key)
    assert found is not None
    assert found.digest == artifact.digest
    assert found.summary == {"n": 1}
    assert found.read("sub/b.bin") == b"beta"
    assert {f.path: f.meta for f in found.files} == {"a.bin": {}, "sub/b.bin": {"rows": 3}}


def test_a_damaged_file_is_not_read(any_store: Store) -> None:
    """Its size and time stamp may be those that were committed."""
    artifact = build(any_store).commit({}, {})
    path = f"{artifact.path}/a.bin"
    stat = os.stat(path) if any_store.is_local else None
    any_store.fs.pipe_file(path, b"alphb")
    if stat is not None:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(Damaged, match=r"a\.bin is damaged"):
        artifact.read("a.bin")
    assert any_store.find("encode", PARTS.key) is None
    assert artifact.read("sub/b.bin") == b"beta"


def test_the_digest_is_of_content_alone(store: Store) -> None:
    one = build(store).commit({"n": 1}, {"host": "a"})
    other = KeyParts("encode", 1, {"resolution": 64}, {})
    two = build(store, other).commit({"n": 2}, {"host": "b"})
    assert one.digest == two.digest
    assert one.key != two.key


@pytest.mark.parametrize(
    "parts",
    [
        KeyParts("train", 1, {"resolution": 32}, {"images": "abc"}),
        KeyParts("encode", 2, {"resolution": 32}, {"images": "abc"}),
        KeyParts("encode", 1, {"resolution": 33}, {"images": "abc"}),
        KeyParts("encode", 1, {"resolution": 32}, {"images": "abd"}),
    ],
)
def test_every_part_of_a_key_counts(parts: KeyParts) -> None:
    assert parts.key != PARTS.key


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda fs, p: fs.rm_file(f"{p}/a.bin"), "a.bin is missing"),
        (lambda fs, p: fs.pipe_file(f"{p}/a.bin", b"alphq"), "a.bin is damaged"),
        (lambda fs, p: fs.pipe_file(f"{p}/a.bin", b"alph"), "has 4 bytes, 5 were committed"),
        (lambda fs, p: fs.pipe_file(f"{p}/manifest.json", b"{"), "not a readable record"),
        (
            lambda fs, p: fs.pipe_file(
                f"{p}/manifest.json",
                fs.cat_file(f"{p}/manifest.json").replace(b"sub/b.bin", b"sub/c.bin"),
            ),
            "its content is not what was written",
        ),
    ],
)
def test_a_damaged_artifact_is_a_miss_with_a_warning(
    any_store: Store, caplog: pytest.LogCaptureFixture, harm, words: str
) -> None:
    artifact = build(any_store).commit({}, {})
    harm(any_store.fs, artifact.path)
    with caplog.at_level(logging.WARNING, logger="kiln"):
        assert any_store.find("encode", PARTS.key) is None
    assert words in caplog.text
    assert "rebuilt" in caplog.text


def test_no_byte_of_a_manifest_can_change_unnoticed(url_of: UrlOf) -> None:
    store = Store(url_of("memory"))
    # The fraction has several spellings: changing its last digit gives the same number.
    artifact = build(store).commit({"n": 1, "loss": 0.1 + 0.2}, {"host": "ä", "fits": [True]})
    path = f"{artifact.path}/manifest.json"
    whole = store.fs.cat_file(path)
    for place in range(len(whole)):
        harmed = bytearray(whole)
        harmed[place] ^= 1
        store.fs.pipe_file(path, bytes(harmed))
        assert store.find("encode", PARTS.key) is None, place
    store.fs.pipe_file(path, whole)
    assert store.find("encode", PARTS.key) is not None


def test_a_manifest_is_of_the_folder_it_is_in(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = build(store).commit({}, {})
    other = build(store, KeyParts("encode", 2, {}, {}))
    for name in ("manifest.json", "a.bin", "sub/b.bin"):
        store.fs.pipe_file(f"{other.path}/{name}", artifact.read(name))
    assert store.find("encode", other.parts.key) is None
    assert "is of another artifact" in caplog.text
    assert [found[:2] for found in store.unreadable()] == [("encode", other.parts.key)]


def test_what_a_record_says_need_not_be_json_to_begin_with(store: Store) -> None:
    build(store).commit({"sizes": {10: 1, 9: (2, 3)}}, {})
    found = store.find("encode", PARTS.key)
    assert found is not None
    assert found.summary == {"sizes": {"10": 1, "9": [2, 3]}}


def test_a_folder_where_a_file_was_is_a_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(str(tmp_path))
    artifact = build(store).commit({}, {})
    (Path(artifact.path) / "a.bin").unlink()
    (Path(artifact.path) / "a.bin").mkdir()
    assert store.find("encode", PARTS.key) is None
    assert "a.bin cannot be read" in caplog.text


def test_an_invalid_store_is_a_one_line_error() -> None:
    with pytest.raises(StoreError, match="store foo://bar"):
        Store("foo://bar")
    for url in ("ftp://127.0.0.1:9/store", "zip:///nowhere.zip"):  # their clients open at once
        with pytest.raises(StoreError, match=f"^store {url}: "):
            Store(url)


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
            patch.setattr(store_module, "first_fault", first_fault)
            assert any_store.shard("encode", "k", discard=True) is None
        if committed:
            commit("the other")
        return fault

    (tar,) = commit("us").files
    any_store.fs.pipe_file(f"{any_store.shards_path('encode')}/{tar.path}", b"tar bytez")
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "first_fault", other_first)
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


def test_all_is_synced_before_the_record_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure the disk has what was synced, names in folders too."""
    store = Store(str(tmp_path / "new/store"))
    (tmp_path / "x").write_bytes(b"tar bytes")
    contents, names, fsync = set[int](), set[Path](), os.fsync

    def watched(descriptor: int) -> None:
        contents.add(os.fstat(descriptor).st_ino)
        folder = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        names.update(folder.iterdir() if folder.is_dir() else [])
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    draft = build(store)
    draft.upload(str(tmp_path / "x"), "deep/er/c.bin")
    Path(draft.path, "by/another").mkdir(parents=True)
    Path(draft.path, "by/another/process").write_bytes(b"1")
    draft.add(FileEntry("by/another/process", 1, digest_bytes(b"1")))
    draft.add_shard(store.commit_shard("encode", "k", {".tar": str(tmp_path / "x")}, {}))
    files = [Path(draft.path, path).resolve() for path in draft.files]

    def check(file: Path) -> None:
        assert file.stat().st_ino in contents
        assert {p for p in [file, *file.parents] if tmp_path in p.parents} <= names

    for file in files:
        check(file)
    check(Path(draft.commit({}, {}).path, "manifest.json"))


def test_a_file_that_cannot_be_copied_leaves_the_one_that_was_there(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    draft = build(store)
    with pytest.raises(FileNotFoundError):
        draft.upload(str(tmp_path / "missing"), "a.bin")
    assert {p.name for p in Path(draft.path).iterdir()} == {"a.bin", "sub"}
    assert (Path(draft.path) / "a.bin").read_bytes() == b"alpha"


def test_several_may_ask_at_once_whether_a_store_is_writable(any_store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        for answer in [pool.submit(any_store.check_writable) for _ in range(24)]:
            answer.result()
    assert any_store.fs.find(any_store.root) == []


@pytest.mark.slow
def test_a_misspelt_bucket_is_refused_and_not_created(
    s3: S3Server, gcs: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs, "absent", "buckte")
    for url in ("s3://buckte/store", "gs://buckte/store"):
        with pytest.raises(StoreError, match=f"^store {url}: its bucket does not exist: correct"):
            Store(url).check_writable()
    assert "buckte" not in Store("s3://buckte").fs.ls("")
    buckets = [path for _, path in s3.requests + gcs.requests if path.endswith("/buckte")]
    assert buckets == [], "a bucket was asked for"


@pytest.mark.slow
def test_a_role_that_may_not_ask_for_its_bucket_can_write_there(
    gcs: GcsServer, url_of: UrlOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs, "forbidden", "/b/[^/]+$")
    Store(url_of("gs")).check_writable()


def test_a_store_that_ignores_conditions_is_refused(
    url_of: UrlOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(url_of("memory"))
    monkeypatch.setattr(store_module, "create", lambda fs, path, data: not fs.pipe_file(path, data))
    with pytest.raises(StoreError, match="ignores the conditions of writes"):
        store.check_writable()
    assert store.fs.find(store.root) == []


def test_a_folder_in_a_folder_of_the_same_name_is_listed(any_store: Store) -> None:
    fs, root = any_store.fs, any_store.root
    fs.makedirs(f"{root}/fox/fox/v1")
    fs.pipe_file(f"{root}/fox/fox/v1/a", b"a")
    fs.pipe_file(f"{root}/fox/b", b"b")
    assert subfolders(fs, f"{root}/fox") == ["fox"]
    assert sorted(map(name_of, files(fs, f"{root}/fox"))) == ["a", "b"]
    assert list(files(fs, f"{root}/fox/b")) == [], "a file holds no file"


@pytest.mark.slow
def test_a_stage_behind_a_link_is_listed(tmp_path: Path) -> None:
    """A stage may have been moved to a larger disk."""
    store = Store(str(tmp_path / "store"))
    build(store).commit({}, {})
    stage = Path(store.root, "encode")
    stage.rename(tmp_path / "larger")
    stage.symlink_to(tmp_path / "larger")
    Path(store.root, "dangling").symlink_to(tmp_path / "absent")
    assert [stage for stage, _ in store.artifact_keys()] == ["encode"]


def test_the_marker_of_a_folder_in_a_bucket_is_not_in_it(s3: S3Server, url_of: UrlOf) -> None:
    store = Store(url_of("s3"))
    marker = urllib.request.Request(f"{s3.url}/{store.root}/fox/", data=b"", method="PUT")
    urllib.request.urlopen(marker).close()
    store.fs.pipe_file(f"{store.root}/fox/a", b"a")
    assert [name_of(entry) for entry in files(store.fs, f"{store.root}/fox")] == ["a"]


def test_what_another_machine_does_is_seen_at_once(any_store: Store) -> None:
    other = elsewhere(any_store)
    assert list(any_store.artifacts()) == []
    ours = build(any_store).commit({}, {})
    assert [a.key for a in any_store.artifacts()] == [ours.key]
    theirs = build(other, KeyParts("encode", 2, {}, {})).commit({}, {})
    assert {a.key for a in any_store.artifacts()} == {ours.key, theirs.key}
    other.fs.rm(ours.path, recursive=True)
    assert any_store.find("encode", ours.key) is None
    assert not any_store.fs.exists(ours.path)
    assert [a.key for a in any_store.artifacts()] == [theirs.key]


@pytest.mark.parametrize("kind", REMOTE)
def test_a_store_that_keeps_checksums_is_not_read_to_reuse_an_artifact(
    kind: str, url_of: UrlOf, requests_to: RequestsTo, tmp_path: Path
) -> None:
    store = Store(url_of(kind))
    (tmp_path / "x").write_bytes(b"tar bytes")
    draft = build(store)
    shard = store.commit_shard("encode", "k", {".tar": str(tmp_path / "x")}, {})
    draft.add_shard(shard)
    artifact, tar = draft.commit({}, {}), shard.files[0].path

    def read_by(act: Callable[[], object]) -> set[str]:
        """Files whose bytes are asked for meanwhile; Google has a path of its own for them."""
        requests = requests_to(kind)
        before = len(requests)
        act()
        asked = [path for method, path in requests[before:] if method == "GET"]
        media = [p for p in asked if kind == "s3" or p.startswith("/download/")]
        return {path.rpartition("/")[2] for path in media} & {"a.bin", "b.bin", tar}

    found = store.find("encode", PARTS.key)
    assert found is not None
    assert found.digest == artifact.digest
    assert read_by(lambda: store.find("encode", PARTS.key)) == set()
    assert read_by(lambda: store.fault(found, deep=True)) == {"a.bin", "b.bin", tar}
    assert store.fault(found, deep=True) is None

    elsewhere(store).fs.pipe_file(f"{store.shards_path('encode')}/{tar}", b"tar bytez")
    fault = f"../shards/{tar} is damaged: its sha256 differs from the committed one"
    assert store.fault(found) == fault


def test_a_store_without_checksums_records_none(url_of: UrlOf) -> None:
    store = Store(url_of("memory"))
    build(store).commit({}, {})
    found = store.find("encode", PARTS.key)
    assert found is not None
    assert [entry.etag for entry in found.files] == [None, None]
    assert b"etag" not in found.read("manifest.json")


def flip(path: Path) -> None:
    """Another byte, at the same size and time stamp: what a failing disk does."""
    before, data = path.stat(), path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def whole(tmp_path: Path) -> Artifact:
    """An artifact on a local disk, with files written, uploaded, added, and of a shard."""
    store = Store(str(tmp_path / "store"))
    (tmp_path / "x").write_bytes(b"tar bytes")
    draft = build(store)
    draft.upload(str(tmp_path / "x"), "c.bin")
    store.fs.pipe_file(f"{draft.path}/d.bin", b"delta")
    draft.add(FileEntry("d.bin", 5, digest_bytes(b"delta")))
    draft.add_shard(store.commit_shard("encode", "k", {".tar": str(tmp_path / "x")}, {}))
    return draft.commit({}, {})


@pytest.mark.parametrize("there", [b"gamma", b"delt"])
def test_a_file_that_was_damaged_since_another_process_wrote_it_is_not_committed(
    any_store: Store, there: bytes
) -> None:
    draft = build(any_store)
    any_store.fs.pipe_file(f"{draft.path}/d.bin", there)
    with pytest.raises(Damaged, match=r"d\.bin is damaged"):
        draft.add(FileEntry("d.bin", 5, digest_bytes(b"delta")))


def test_a_file_of_the_next_builder_is_no_damage(any_store: Store) -> None:
    fs, path = any_store.fs, f"{any_store.root}/encode/{PARTS.key}/lock.json"
    with any_store.lock("encode", PARTS.key) as paused:
        draft = build(any_store, lock=paused)
        with seize(fs, path, cas.read(fs, path)):
            fs.pipe_file(f"{draft.path}/d.bin", b"other")
            with pytest.raises(LockLost):
                draft.add(FileEntry("d.bin", 5, digest_bytes(b"delta")))


def test_a_file_that_is_damaged_while_it_is_added_is_found(
    any_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, digest_stream = build(any_store), checksummed_files.digest_stream
    any_store.fs.pipe_file(f"{draft.path}/d.bin", b"delta")

    def damaged_after(stream: IO[bytes]) -> tuple[str, int]:
        found = digest_stream(stream)
        time.sleep(TICK)
        any_store.fs.pipe_file(f"{draft.path}/d.bin", b"gamma")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(checksummed_files, "digest_stream", damaged_after)
        draft.add(FileEntry("d.bin", 5, digest_bytes(b"delta")))
    artifact = draft.commit({}, {})
    assert any_store.find(artifact.stage, artifact.key) is None


TAR = f"../shards/k.{digest_bytes(b'tar bytes')}.tar"
FILES = ["a.bin", "sub/b.bin", "c.bin", "d.bin", TAR]


def test_a_reuse_reads_no_file_whose_size_and_time_stamp_are_as_committed(
    whole: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sorted(entry.path for entry in whole.files) == sorted(FILES)
    monkeypatch.setattr(checksummed_files, "hash_file", lambda *_: pytest.fail("read"))
    assert whole.store.find("encode", whole.key) is not None
    assert whole.store.shard("encode", "k") is not None


@pytest.mark.parametrize("path", FILES)
def test_a_time_stamp_that_changed_has_its_file_hashed(whole: Artifact, path: str) -> None:
    file = Path(whole.path, path)
    flip(file)
    os.utime(file)
    assert whole.store.find("encode", whole.key) is None


def test_a_copied_store_is_hashed_once(
    whole: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy may have new time stamps."""
    shutil.copytree(whole.store.root, tmp_path / "copy", copy_function=shutil.copyfile)
    copy = Store(str(tmp_path / "copy"))
    assert copy.find("encode", whole.key) is not None and copy.shard("encode", "k") is not None
    monkeypatch.setattr(checksummed_files, "hash_file", lambda *_: pytest.fail("read"))
    assert copy.find("encode", whole.key) is not None and copy.shard("encode", "k") is not None


@pytest.mark.parametrize("kind", REMOTE)
def test_a_bucket_that_was_copied_to_a_disk_is_reused(
    kind: str, url_of: UrlOf, tmp_path: Path
) -> None:
    """Its records have the bucket's checksums instead of time stamps."""
    bucket = Store(url_of(kind))
    artifact = build(bucket).commit({}, {})
    bucket.fs.get(f"{bucket.root}/", f"{tmp_path}/copy/", recursive=True)
    copy = Store(str(tmp_path / "copy"))
    found = copy.find(artifact.stage, artifact.key)
    assert found is not None and found.digest == artifact.digest
    flip(Path(found.path, "a.bin"))
    assert copy.find(artifact.stage, artifact.key) is None


@pytest.mark.parametrize("path", FILES)
def test_a_byte_that_flips_beneath_its_time_stamp_is_found_by_a_deep_check_and_then_by_all(
    whole: Artifact, path: str
) -> None:
    flip(Path(whole.path, path))
    assert whole.store.find("encode", whole.key) is not None
    assert f"{path} is damaged" in str(whole.store.fault(whole, deep=True))
    assert f"{path} is damaged" in str(whole.store.fault(whole))
    assert whole.store.find("encode", whole.key) is None


def test_a_damaged_file_is_reported_at_the_end_of_a_read_and_at_the_next_reuse(
    whole: Artifact,
) -> None:
    path = Path(whole.path, TAR).resolve()
    sha256 = digest_bytes(b"tar bytes")
    with checksummed_files.open_checked(str(path), sha256) as stream:
        assert stream.read(3) == b"tar"
    flip(path)
    damaged = pytest.raises(checksummed_files.Damaged, match=r"\.tar is damaged")
    with damaged, checksummed_files.open_checked(str(path), sha256) as stream:
        assert stream.read(3) == b"tar"
    assert whole.store.find("encode", whole.key) is None


def test_damage_is_reported_instead_of_its_consequence(whole: Artifact) -> None:
    path = Path(whole.path, "a.bin")
    for kind, sha256 in ((checksummed_files.Damaged, "0" * 64), (KeyError, digest_bytes(b"alpha"))):
        with pytest.raises(kind), checksummed_files.open_checked(str(path), sha256):
            raise KeyError("of a reader")


def test_what_a_newer_version_wrote_is_neither_read_nor_rebuilt(store: Store) -> None:
    artifact = build(store).commit({}, {})
    newer = {
        **artifact.manifest,
        "format": checksummed_files.FORMAT + 1,
        "files": [{"path": "a", "new": 1}],
    }
    checksummed_files.write_record(store.fs, f"{artifact.path}/manifest.json", newer)
    with pytest.raises(
        checksummed_files.NewerFormat, match="newer version of kilnworks: update this one"
    ):
        store.find("encode", PARTS.key)
