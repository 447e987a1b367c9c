"""An artifact exists exactly when its manifest does, while its bytes are what they were."""

import logging
from pathlib import Path
from uuid import uuid4

import pytest

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
    artifact = build(store).commit({"n": 1}, {"host": "a"})
    path = f"{artifact.path}/manifest.json"
    whole = store.fs.cat_file(path)
    for place in range(len(whole)):
        harmed = bytearray(whole)
        harmed[place] ^= 1
        store.fs.pipe_file(path, bytes(harmed))
        found = store.find("encode", PARTS.key)
        # A change in the white space between values says nothing else; anything else is a miss.
        assert found is None or found.manifest == artifact.manifest, place


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
    store.fs.pipe_file(f"{store.shards_path('encode')}/k1.tar", b"tar bytez")
    assert store.shard("encode", "k1") is None
    assert "k1.tar is damaged" in caplog.text
    assert store.find("encode", one.recipe.key) is None


def test_a_shard_half_written_is_not_there(store: Store) -> None:
    store.fs.makedirs(store.shards_path("encode"), exist_ok=True)
    store.fs.pipe_file(f"{store.shards_path('encode')}/k2.tar", b"half")
    assert store.shard("encode", "k2") is None
