"""An artifact exists exactly when its manifest does, while its bytes are what they were."""

import logging
import os
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gcs_server import GcsServer
from store_drafts import PARTS, build, elsewhere
from store_servers import S3Server, UrlOf

from artifacts import records
from artifacts import store as store_module
from artifacts.filesystems import files, name_of, present_time, subfolders
from artifacts.records import Damaged, FileEntry, digest_bytes
from artifacts.store import KeyParts, Store
from configs.errors import Failed, Refused


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
    for name in ("s3://bucket/a::b", "./a::b"):
        with pytest.raises(Refused, match=f"^store {name}: `::` chains URLs, such as zip:"):
            Store(name)
    with pytest.raises(Refused, match="store foo://bar"):
        Store("foo://bar")
    for url in ("ftp://127.0.0.1:9/store", "zip:///nowhere.zip"):  # their clients open at once
        with pytest.raises(Refused, match=f"^store {url}: "):
            Store(url)


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
        with pytest.raises(Refused, match=f"^store {url}: its bucket does not exist: correct"):
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


@pytest.mark.slow
def test_a_bucket_that_deletes_nothing_is_refused_and_nothing_stays_there(
    gcs: GcsServer, url_of: UrlOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt of a run or of `kiln gc` would leave a file that gc cannot delete, either."""
    store = Store(url_of("gs"))
    monkeypatch.setattr(gcs, "forbidden", "^DELETE ")
    for attempt in (store.check_writable, lambda: present_time(store.fs, store.root)):
        with pytest.raises(OSError, match="has no access"):
            attempt()
    assert store.fs.find(store.root) == []


def test_a_store_that_ignores_conditions_is_refused(
    url_of: UrlOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(url_of("memory"))
    monkeypatch.setattr(store_module, "create", lambda fs, path, data: not fs.pipe_file(path, data))
    with pytest.raises(Refused, match="ignores the conditions of writes"):
        store.check_writable()
    assert store.fs.find(store.root) == []


def test_a_store_that_replaces_a_newer_file_is_refused(
    url_of: UrlOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(url_of("memory"))
    monkeypatch.setattr(
        store_module, "swap", lambda fs, path, seen, data: fs.pipe_file(path, data) or seen
    )
    with pytest.raises(Refused, match=r"ignores the conditions of writes \(If-Match\)"):
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


def test_what_a_newer_version_wrote_is_neither_read_nor_rebuilt(store: Store) -> None:
    artifact = build(store).commit({}, {})
    newer = {**artifact.manifest, "format": records.FORMAT + 1, "files": [{"path": "a", "new": 1}]}
    records.write_record(store.fs, f"{artifact.path}/manifest.json", newer)
    with pytest.raises(Failed, match="newer version of kilnworks: update this one"):
        store.find("encode", PARTS.key)
