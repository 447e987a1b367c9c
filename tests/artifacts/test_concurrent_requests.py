"""Requests to a remote store are in flight together, and no more of them than needed."""

import threading
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from store_servers import REMOTE, RequestsTo, UrlOf

from artifacts.filesystems import AT_ONCE, ask_at_once
from artifacts.store import KeyParts, Store

SHARDS = 12


def test_a_remote_store_gets_many_requests_at_once_and_answers_come_in_order() -> None:
    together = threading.Barrier(AT_ONCE, timeout=60)

    def ask(number: int) -> int:
        together.wait()
        return number

    found = list(ask_at_once(MemoryFileSystem(), ask, range(2 * AT_ONCE)))
    assert found == list(range(2 * AT_ONCE))


def test_a_local_disk_is_read_file_by_file() -> None:
    threads = set(ask_at_once(LocalFileSystem(), lambda _: threading.get_ident(), range(9)))
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("kind", REMOTE)
def test_a_stage_asks_a_bucket_once_per_shard_and_lists_nothing(
    kind: str, url_of: UrlOf, requests_to: RequestsTo, tmp_path: Path
) -> None:
    store = Store(url_of(kind))
    local = tmp_path / "shard"
    local.write_bytes(b"bytes of a shard")
    keys = [f"{number:064x}" for number in range(SHARDS)]
    before = len(requests_to(kind))
    for key in keys:
        assert store.shard("encode", key) is None
        with store.shard_lock("encode", key):
            assert store.shard("encode", key) is None
            store.commit_shard("encode", key, {".safetensors": str(local)}, {"groups": {"a": 1}})
    built = requests_to(kind)[before:]
    # No record yet, twice; the file, its checksum, the record; the lock read, acquired, released.
    assert len(built) == 8 * SHARDS and not any(map(is_listing, built)), built[
        : len(built) // SHARDS
    ]

    before = len(requests_to(kind))
    shards = [shard for shard in store.committed_shards("encode", keys) if shard is not None]
    read = requests_to(kind)[before:]
    assert [shard.key for shard in shards] == keys
    assert len(read) == SHARDS and not any(map(is_listing, read))

    draft = store.draft(KeyParts("encode", 1, {}, {}))
    for shard in shards:
        draft.add_shard(shard)
    key = draft.commit({}, {}).key
    before = len(requests_to(kind))
    assert store.find("encode", key) is not None
    checked = requests_to(kind)[before:]
    assert len(checked) == 1 + SHARDS and not any(map(is_listing, checked))


def is_listing(request: tuple[str, str]) -> bool:
    method, path = request
    return method == "GET" and path.rstrip("/").endswith(("/bucket", "/b/bucket/o"))
