"""What is committed is known by its content, and there only once all its files are."""

from pathlib import Path

import pytest

from artifacts.keys import digest_bytes
from artifacts.store import KeyParts, Store


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
