"""Shards of a remote store: local copies are checked, fetching is patient, eviction is polite."""

import errno
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from gcsfs.retry import HttpError, validate_response

from artifacts.errors import StoreRefused
from artifacts.latent_shards import LatentShard, open_latents
from artifacts.records import open_checked
from configs.errors import Refused
from runtimes.data import shard_cache
from runtimes.data.loader import open_job_latents
from runtimes.data.shard_cache import ShardFiles

WriteLatents = Callable[..., str]


class Remote:
    """One shard in a remote store, and the folder that it is cached in."""

    def __init__(self, folder: Path, write_latents: WriteLatents) -> None:
        self.url = write_latents(f"memory://{folder.name}", [{"train/8x8": 6}])
        (self.ref,) = open_latents(self.url).shards
        self.folder = folder / "cache/kilnworks/shards"

    def open(self) -> LatentShard:
        return ShardFiles([self.ref], open_limit=1, cache_bytes=10**9)[0]


@pytest.fixture
def remote(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, write_latents: WriteLatents
) -> Remote:
    monkeypatch.setattr("runtimes.data.shard_cache.WAITS", (0.0, 0.0))
    return Remote(tmp_path, write_latents)


@pytest.mark.parametrize("damage", ["cut", "flip", "header"])
def test_a_damaged_local_copy_is_fetched_again(remote: Remote, damage: str) -> None:
    remote.open().close()
    (copy,) = remote.folder.iterdir()
    whole = copy.read_bytes()
    flipped = bytes([*whole[:-5], whole[-5] ^ 1, *whole[-4:]])
    copy.write_bytes({"cut": whole[:-9], "flip": flipped, "header": b"\xff" * 64}[damage])
    assert remote.open().groups == {"train/8x8": 6}
    assert copy.read_bytes() == whole


def test_only_downloads_that_nobody_continues_are_evicted(remote: Remote) -> None:
    remote.folder.mkdir(parents=True)
    for name in ("running.tmp", "left.tmp"):
        (remote.folder / name).write_bytes(b"x" * 1000)
    with (remote.folder / "running.tmp").open("rb") as running:
        fcntl.flock(running, fcntl.LOCK_EX)
        ShardFiles([remote.ref], open_limit=1, cache_bytes=remote.ref.size)[0].close()
    names = {path.name for path in remote.folder.iterdir()}
    assert names == {"running.tmp", f"{remote.ref.sha256}.safetensors"}


def test_reading_ahead_evicts_no_shard_that_is_wanted(
    tmp_path: Path, own_cache: Path, write_latents: WriteLatents
) -> None:
    """In a second epoch, the copy that is wanted next may be the oldest one."""
    url = write_latents(f"memory://{tmp_path.name}", [{"train/8x8": 6}] * 3)
    refs = open_latents(url).shards
    files = ShardFiles(refs, open_limit=1, cache_bytes=2 * max(ref.size for ref in refs))
    for number in (0, 1, 0, 2):
        files._fetch_ahead(number)
    names = {path.stem for path in (tmp_path / "cache/kilnworks/shards").iterdir()}
    assert names == {refs[0].sha256, refs[2].sha256}


def reset() -> None:
    raise ConnectionResetError("reset by peer")


def test_expired_credentials_are_no_outage(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    def expired(*_: object, **__: object) -> None:
        raise PermissionError("The provided token has expired.")

    monkeypatch.setattr(MemoryFileSystem, "open", expired)
    monkeypatch.setattr(time, "sleep", pytest.fail)
    with pytest.raises(PermissionError, match="has expired"):
        remote.open()


def unavailable() -> None:
    """As gcsfs does, whose error is no OSError."""
    validate_response(503, b"Service Unavailable", "path")


def refused() -> None:
    """As gcsfs does: a ValueError, because of a word in the answer."""
    validate_response(503, b"invalid", "path")


@pytest.mark.parametrize("failure", [reset, unavailable, refused])
@pytest.mark.parametrize("failures", [2, 3])
def test_a_passing_failure_of_the_store_is_tried_again(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, failures: int, failure: Callable[[], None]
) -> None:
    left, real = [failures], MemoryFileSystem.open

    def failing(fs: MemoryFileSystem, *arguments: object, **more: object) -> object:
        left[0] -= 1
        if left[0] >= 0:
            failure()
        return real(fs, *arguments, **more)

    monkeypatch.setattr(MemoryFileSystem, "open", failing)
    if failures == 2:
        assert remote.open().groups == {"train/8x8": 6}
    else:
        with pytest.raises((OSError, HttpError)):  # not Refused: nothing is damaged
            remote.open()


def test_a_full_disk_of_the_cache_is_named(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shard_cache, "_download", full)
    with pytest.raises(OSError, match=f"No space left on device: '{remote.folder}/"):
        remote.open()


def test_a_small_disk_holds_fewer_copies(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, write_latents: WriteLatents
) -> None:
    """A cache of the default size would otherwise fill it, and the training would end."""
    refs = open_latents(write_latents(f"memory://{tmp_path.name}", [{"train/8x8": 6}] * 4)).shards
    folder = tmp_path / "cache/kilnworks/shards"
    disk = 3 * (max(ref.size for ref in refs) + 4096)

    def usage(path: Path) -> SimpleNamespace:
        taken = sum(512 * file.stat().st_blocks for file in folder.iterdir())
        return SimpleNamespace(free=disk - taken)

    monkeypatch.setattr(shard_cache.shutil, "disk_usage", usage)
    files = ShardFiles(refs, open_limit=1, cache_bytes=10**9)
    for number in range(4):
        assert files[number].groups == {"train/8x8": 6}
    kept = {path.stem for path in folder.iterdir()}
    assert kept < {ref.sha256 for ref in refs} and refs[3].sha256 in kept
    files.close()


def test_a_shard_that_is_gone_from_the_store_is_named(remote: Remote) -> None:
    MemoryFileSystem().rm(remote.ref.url)
    with pytest.raises(Refused, match=remote.ref.url):
        remote.open()


def test_a_copy_that_another_process_evicts_at_once_is_fetched_again(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for room in a small cache while the copy is written, and takes it before we do."""
    fetch, copies = ShardFiles._fetch, list[Path]()

    def evicted_once(*given: Any) -> Path:
        copies.append(fetch(*given))
        if len(copies) == 1:
            copies[0].unlink()
        return copies[-1]

    monkeypatch.setattr(ShardFiles, "_fetch", evicted_once)
    assert remote.open().groups == {"train/8x8": 6}
    assert len(copies) == 2


def test_only_so_many_shards_are_open(tmp_path: Path, write_latents: WriteLatents) -> None:
    url = write_latents(str(tmp_path), [{"train/8x8": 1}] * 9)
    files = ShardFiles(open_latents(url).shards, open_limit=3, cache_bytes=0)
    for number in range(9):
        assert files[number].groups == {"train/8x8": 1}
    maps = Path("/proc/self/maps").read_text()
    assert sum(ref.url in maps for ref in open_latents(url).shards) == 3
    files.close()


def test_a_download_with_a_wrong_byte_is_made_again(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the right length, so that only its sha256 tells."""
    opened, reads = MemoryFileSystem._open, []

    def damaged_once(fs: MemoryFileSystem, path: str, *args: object, **more: object) -> object:
        stream = opened(fs, path, *args, **more)
        if path.endswith(".safetensors"):
            reads.append(path)
            if len(reads) == 1:
                whole = stream.getvalue()
                return BytesIO(bytes([*whole[:-5], whole[-5] ^ 1, *whole[-4:]]))
        return stream

    monkeypatch.setattr(MemoryFileSystem, "_open", damaged_once)
    remote.open().close()
    (copy,) = remote.folder.iterdir()
    assert len(reads) == 2
    assert hashlib.sha256(copy.read_bytes()).hexdigest() == remote.ref.sha256


def test_a_local_shard_is_read_whole_at_its_first_opening(
    tmp_path: Path, write_latents: WriteLatents
) -> None:
    """A flipped byte, of which neither size nor time stamp tells."""
    (ref,) = open_latents(write_latents(str(tmp_path), [{"train/8x8": 6}])).shards
    path, stat = Path(ref.url), Path(ref.url).stat()
    whole = path.read_bytes()
    path.write_bytes(bytes([*whole[:-5], whole[-5] ^ 1, *whole[-4:]]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(Refused, match=f"{ref.url} is damaged.* run again"):
        ShardFiles([ref], open_limit=1, cache_bytes=0)[0]
    assert path.stat().st_mtime_ns != stat.st_mtime_ns  # so that the next run hashes it


def test_a_local_shard_is_hashed_once(
    tmp_path: Path, write_latents: WriteLatents, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = open_latents(write_latents(str(tmp_path), [{"train/8x8": 1}] * 2)).shards
    read: list[str] = []

    def noting(url: str, sha256: str) -> object:
        read.append(sha256)
        return open_checked(url, sha256)

    monkeypatch.setattr("runtimes.data.shard_cache.open_checked", noting)
    files = ShardFiles(refs, open_limit=1, cache_bytes=0)
    for number in (0, 1, 0, 1):
        assert files[number].groups == {"train/8x8": 1}
    assert read == [ref.sha256 for ref in refs]


def test_a_copy_gets_its_name_while_no_eviction_counts(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eviction that lists the folder meanwhile would miss the file, and delete too little."""
    downloaded, download = threading.Event(), shard_cache._download
    locks = remote.folder.parent / "shard-locks"
    held = ExitStack()

    def download_and_lock(*given: Any) -> None:
        download(*given)
        lock = held.enter_context((locks / shard_cache.EVICTION).open())
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process begins to evict
        downloaded.set()

    monkeypatch.setattr(shard_cache, "_download", download_and_lock)
    reader = threading.Thread(target=remote.open)
    with held:
        reader.start()
        assert downloaded.wait(60)
        reader.join(0.3)
        assert [path.suffix for path in remote.folder.iterdir()] == [".tmp"]
    reader.join(60)
    assert [path.suffix for path in remote.folder.iterdir()] == [".safetensors"]


@pytest.mark.slow
def test_a_store_that_refuses_the_latents_is_no_wrong_input(refusing_url: str) -> None:
    """Each attempt of a training opens the latents; wrong input has no further attempt."""
    with pytest.raises(StoreRefused, match="invalid at this time"):
        open_job_latents(f"{refusing_url}/encode/key")
