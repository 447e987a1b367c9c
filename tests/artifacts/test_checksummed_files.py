"""What is committed is known by its content, and there only once all its files are."""

import gc
import os
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem

from artifacts.filesystems import replacing
from artifacts.lock import LockLost
from artifacts.records import (
    Damaged,
    FileEntry,
    copy_checked,
    digest_bytes,
    encode_record,
    first_fault,
    read_record,
)
from artifacts.safetensors import writing
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


def test_a_copy_of_a_builder_that_lost_its_lock_changes_no_later_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"of the former owner")
    target = tmp_path / "version/weights"
    target.parent.mkdir()
    target.write_bytes(b"of the new owner")

    def lost() -> None:
        raise LockLost("another process took the lock over")

    digest = digest_bytes(source.read_bytes())
    with pytest.raises(LockLost):
        copy_checked(str(source), digest, LocalFileSystem(), str(target), lost)
    assert target.read_bytes() == b"of the new owner"


def test_the_error_of_a_full_disk_names_the_file_that_was_to_be_written(tmp_path: Path) -> None:
    """A registry or a cache may be on another disk than the store."""
    path = f"{tmp_path}/registry/weights"
    with pytest.raises(OSError, match="No space left") as raised, replacing(path) as beside:
        os.symlink("/dev/full", beside)
        with open(beside, "wb") as stream:
            stream.write(b"x")
    assert raised.value.filename == path


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


def test_a_long_record_is_read_without_collections(tmp_path: Path) -> None:
    """Collections visit all entries: 400,000 shards would take twice the time."""
    entries = [FileEntry(f"{n}.tar", 0, "0" * 64, {"groups": {"a": n}}, "e") for n in range(20_000)]
    (tmp_path / "record").write_bytes(encode_record({"files": entries}))
    seen: list[str] = []

    def count(phase: str, _: dict[str, int]) -> None:
        seen.append(phase)

    fs, path = LocalFileSystem(), str(tmp_path / "record")
    read_record(fs, path, with_files=False)
    gc.callbacks.append(count)
    try:
        record = read_record(fs, path)
        during = len(seen)
    finally:
        gc.callbacks.remove(count)
    assert record is not None and record["files"] == entries
    assert during <= 2 and gc.isenabled()  # begin and end of the one behind it; else 100


def test_a_reuse_asks_a_disk_once_per_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, asked = Store(str(tmp_path)), list[str]()
    draft = store.draft(KeyParts("encode", 1, {}, {}))
    for number in range(20):
        draft.write(f"{number}.bin", b"data")
    made, ask = draft.commit({}, {}), os.stat

    def counted(path: str, **options: bool) -> os.stat_result:
        asked.append(path)
        return ask(path, **options)

    monkeypatch.setattr(os, "stat", counted)
    assert first_fault(store.fs, made.path, made.files) is None
    assert len(asked) == len(made.files)
