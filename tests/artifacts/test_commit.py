"""What is committed is known by its content, and there only once all its files are."""

from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem

from artifacts.artifact_key import KeyParts
from artifacts.commit import Damaged, read_record
from artifacts.hashing import digest_bytes
from artifacts.lock import LockLost
from artifacts.safetensors import writing
from artifacts.store import Store


def committed(store: Store, resolution: int, data: bytes, name: str = "a.bin") -> str:
    draft = store.draft(KeyParts("encode", 1, {"resolution": resolution}, {}))
    draft.write(name, data)
    return draft.commit({}, {}).digest


def test_other_bytes_of_the_same_length_are_another_digest(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    assert committed(store, 32, b"alpha") != committed(store, 64, b"gamma")


def test_the_same_bytes_under_another_name_are_another_digest(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    assert committed(store, 32, b"alpha") != committed(store, 64, b"alpha", "b.bin")


def test_a_shard_of_which_a_file_cannot_be_copied_is_not_there(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode())
    folder = Path(store.shards_path("encode"))
    (folder / f"key.{digest_bytes(b'b')}.b").mkdir(parents=True)  # where its second file is to be
    files = {".a": str(tmp_path / "a"), ".b": str(tmp_path / "b")}
    with pytest.raises(OSError):
        store.commit_shard("encode", "key", files, {})
    assert not (folder / "key.json").exists()


@pytest.mark.parametrize("data", [b"", b"{", b"\xa0", b'{"sha256": "0", "files": []}'])
def test_a_record_with_other_bytes_is_damaged(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "record.json").write_bytes(data)
    with pytest.raises(Damaged, match=r"record\.json is not a readable record"):
        read_record(LocalFileSystem(), f"{tmp_path}/record.json")


def test_a_tensor_file_that_cannot_be_written_leaves_the_one_that_was_there(tmp_path: Path) -> None:
    """A builder that woke after another committed the file is stopped while it writes."""
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet/w").write_bytes(b"committed")
    with pytest.raises(LockLost), writing(LocalFileSystem(), str(tmp_path), "unet/w", []) as sink:
        sink.write(b"half")
        raise LockLost
    assert (tmp_path / "unet/w").read_bytes() == b"committed"
    assert [path.name for path in (tmp_path / "unet").iterdir()] == ["w"]
