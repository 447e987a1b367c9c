"""Reuse of artifacts: what is compared, what is read, and when damage is found."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
from store_drafts import PARTS, build, elsewhere, flip
from store_servers import REMOTE, RequestsTo, UrlOf

from artifacts import records
from artifacts.records import TICK, Damaged, FileEntry, digest_bytes
from artifacts.store import Artifact, Store


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


def test_a_file_that_is_damaged_while_it_is_added_is_found(
    any_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, digest_stream = build(any_store), records.digest_stream
    any_store.fs.pipe_file(f"{draft.path}/d.bin", b"delta")

    def damaged_after(stream: IO[bytes]) -> tuple[str, int]:
        found = digest_stream(stream)
        time.sleep(TICK)
        any_store.fs.pipe_file(f"{draft.path}/d.bin", b"gamma")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(records, "digest_stream", damaged_after)
        draft.add(FileEntry("d.bin", 5, digest_bytes(b"delta")))
    artifact = draft.commit({}, {})
    assert any_store.find(artifact.stage, artifact.key) is None


TAR = f"../shards/k.{digest_bytes(b'tar bytes')}.tar"


FILES = ["a.bin", "sub/b.bin", "c.bin", "d.bin", TAR]


def test_a_reuse_reads_no_file_whose_size_and_time_stamp_are_as_committed(
    whole: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sorted(entry.path for entry in whole.files) == sorted(FILES)
    monkeypatch.setattr(records, "hash_file", lambda *_: pytest.fail("read"))
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
    monkeypatch.setattr(records, "hash_file", lambda *_: pytest.fail("read"))
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
    with records.open_checked(str(path), sha256) as stream:
        assert stream.read(3) == b"tar"
    flip(path)
    damaged = pytest.raises(records.Damaged, match=r"\.tar is damaged")
    with damaged, records.open_checked(str(path), sha256) as stream:
        assert stream.read(3) == b"tar"
    assert whole.store.find("encode", whole.key) is None


def test_damage_is_reported_instead_of_its_consequence(whole: Artifact) -> None:
    path = Path(whole.path, "a.bin")
    for kind, sha256 in ((records.Damaged, "0" * 64), (KeyError, digest_bytes(b"alpha"))):
        with pytest.raises(kind), records.open_checked(str(path), sha256):
            raise KeyError("of a reader")
