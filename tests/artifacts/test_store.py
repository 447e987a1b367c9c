"""An artifact exists exactly when its manifest does, while its bytes are what they were."""

import hashlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from artifacts.keys import digest_bytes
from artifacts.store import Draft, KeyParts, Store, StoreError

PARTS = KeyParts("encode", 1, {"resolution": 32}, {"images": "abc"})


def build(store: Store, parts: KeyParts = PARTS) -> Draft:
    draft = store.draft(parts)
    draft.write("a.bin", b"alpha")
    draft.write("sub/b.bin", b"beta", rows=3)
    return draft


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store") if request.param == "local" else f"memory://{uuid4()}")


def test_an_artifact_is_there_only_after_commit(store: Store) -> None:
    draft = build(store)
    assert store.find("encode", PARTS.key) is None
    artifact = draft.commit({"n": 1}, {"seconds": 0.1})
    found = store.find("encode", PARTS.key)
    assert found is not None
    assert found.digest == artifact.digest
    assert found.summary == {"n": 1}
    assert found.read("sub/b.bin") == b"beta"
    assert {f.path: f.meta for f in found.files} == {"a.bin": {}, "sub/b.bin": {"rows": 3}}


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
    store: Store, caplog: pytest.LogCaptureFixture, harm, words: str
) -> None:
    artifact = build(store).commit({}, {})
    harm(store.fs, artifact.path)
    with caplog.at_level(logging.WARNING, logger="kiln"):
        assert store.find("encode", PARTS.key) is None
    assert words in caplog.text
    assert "rebuilt" in caplog.text


def test_no_byte_of_a_manifest_can_change_unnoticed(store: Store) -> None:
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
    assert store.find("encode", other.recipe.key) is None
    assert "is of another artifact" in caplog.text
    assert [found[:2] for found in store.unreadable()] == [("encode", other.recipe.key)]


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


def test_a_store_that_cannot_be_is_said_in_one_line() -> None:
    with pytest.raises(StoreError, match="store foo://bar"):
        Store("foo://bar")


def test_shards_are_shared_and_verified(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "x").write_bytes(b"tar bytes")
    shard = store.commit_shard("encode", "k1", {".tar": str(tmp_path / "x")}, {"samples": 2})
    found = store.shard("encode", "k1")
    assert found == shard
    one, two = (store.draft(KeyParts("encode", 1, {"n": n}, {})) for n in (1, 2))
    for draft in (one, two):
        draft.add_shard(shard)
    digests = {draft.commit({}, {}).digest for draft in (one, two)}
    assert len(digests) == 1
    assert store.find("encode", one.recipe.key) is not None
    store.fs.pipe_file(f"{store.shards_path('encode')}/k1.tar", b"tar bytez")
    assert store.shard("encode", "k1") is None
    assert "k1.tar is damaged" in caplog.text
    assert store.find("encode", one.recipe.key) is None


def test_a_shard_half_written_is_not_there(store: Store) -> None:
    store.fs.makedirs(store.shards_path("encode"), exist_ok=True)
    store.fs.pipe_file(f"{store.shards_path('encode')}/k2.tar", b"half")
    assert store.shard("encode", "k2") is None


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
        path = Path(store.shards_path("encode")) / "k.tar"
        while not done.is_set():
            if path.exists() and (data := path.read_bytes()) not in contents:
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
    assert {p.name for p in Path(store.shards_path("encode")).iterdir()} == {"k.tar", "k.json"}


def test_a_file_that_cannot_be_copied_leaves_the_one_that_was_there(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    draft = build(store)
    with pytest.raises(FileNotFoundError):
        draft.upload(str(tmp_path / "missing"), "a.bin")
    assert {p.name for p in Path(draft.path).iterdir()} == {"a.bin", "sub"}
    assert (Path(draft.path) / "a.bin").read_bytes() == b"alpha"


def test_several_may_ask_at_once_whether_a_store_is_writable(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        for answer in [pool.submit(store.check_writable) for _ in range(80)]:
            answer.result()
    assert store.fs.ls(store.root) == []


class KeepsChecksums(MemoryFileSystem):
    """A memory store that keeps MD5 sums, as Google's and Amazon's do, and counts reads."""

    protocol = "keeps-checksums"
    cachable = False
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    opened: ClassVar[list[str]] = []

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = super().info(path, **kwargs)
        if found["type"] == "file":
            data = self.store[self._strip_protocol(path)].getvalue()
            found["ETag"] = hashlib.md5(data).hexdigest()
        return found

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode == "rb":
            self.opened.append(path.rpartition("/")[2])
        return super().open(path, mode, **kwargs)


def test_a_store_that_keeps_checksums_is_not_read_to_reuse_an_artifact(tmp_path: Path) -> None:
    fsspec.register_implementation("keeps-checksums", KeepsChecksums, clobber=True)
    store = Store("keeps-checksums://store")
    (tmp_path / "x").write_bytes(b"tar bytes")
    draft = build(store)
    draft.add_shard(store.commit_shard("encode", "k", {".tar": str(tmp_path / "x")}, {}))
    artifact = draft.commit({}, {})

    KeepsChecksums.opened.clear()
    found = store.find("encode", PARTS.key)
    assert found is not None
    assert found.digest == artifact.digest
    assert set(KeepsChecksums.opened) <= {"manifest.json"}
    assert store.fault(found, deep=True) is None
    assert {"a.bin", "b.bin", "k.tar"} <= set(KeepsChecksums.opened)

    store.fs.pipe_file(f"{store.shards_path('encode')}/k.tar", b"tar bytez")
    assert (
        store.fault(found)
        == "../shards/k.tar is damaged: its sha256 differs from the committed one"
    )


def test_a_store_without_checksums_records_none(store: Store) -> None:
    build(store).commit({}, {})
    found = store.find("encode", PARTS.key)
    assert found is not None
    assert [entry.etag for entry in found.files] == [None, None]
    assert b"etag" not in found.read("manifest.json")
