"""The shards being read: mapped into memory, remote ones first copied to a bounded folder."""

from __future__ import annotations

import hashlib
import logging
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from artifacts.commit import Damaged, open_checked
from artifacts.latents import LatentShard, ShardRef
from artifacts.models import cache_folder
from runtimes.contract import WrongInput

CHUNK = 2**20
#: Seconds before each further try to fetch a shard.
WAITS = (1.0, 5.0)
#: Seconds after which a download that has not grown belongs to nobody.
ABANDONED = 3600.0
log = logging.getLogger("kiln")


class ShardFiles:
    """Opens shards by number; at most `open_limit` are mapped, the longest unused is closed.

    Args:
        cache_bytes: how much of a remote store is kept locally, least recently used out first.
    """

    def __init__(self, refs: Sequence[ShardRef], *, open_limit: int, cache_bytes: int) -> None:
        self._refs, self._open_limit, self._cache_bytes = refs, open_limit, cache_bytes
        self._open: OrderedDict[int, LatentShard] = OrderedDict()
        self._checked: set[str] = set()  # sha256 of files that were read and have it

    def __getitem__(self, number: int) -> LatentShard:
        """The shard, open. Raises WrongInput, naming the file, if it is missing or damaged."""
        shard = self._open.get(number)
        if shard is None:
            shard = self._open[number] = self._load(self._refs[number])
            while len(self._open) > self._open_limit:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(number)
        return shard

    def close(self) -> None:
        """Unmap every shard."""
        while self._open:
            self._open.popitem()[1].close()

    def _load(self, ref: ShardRef) -> LatentShard:
        try:
            fs, path = url_to_fs(ref.url)
            if isinstance(fs, LocalFileSystem):
                return self._checked_once(path, ref)
            return self._kept(ref) or _open(self._fetch(fs, path, ref), ref)
        except Damaged as error:
            raise WrongInput(f"latent shard {error}") from None
        except (FileNotFoundError, ValueError) as error:
            raise WrongInput(
                f"latent shard {ref.url} cannot be used ({error}); run the flow again to rebuild it"
            ) from None

    def _checked_once(self, path: str, ref: ShardRef) -> LatentShard:
        """A local shard; at its first opening all of it is read, and must be what was committed."""
        shard = _open(Path(path), ref)
        if ref.sha256 not in self._checked:
            with open_checked(path, ref.sha256):
                pass
            self._checked.add(ref.sha256)
        return shard

    def _kept(self, ref: ShardRef) -> LatentShard | None:
        """The local copy, if there is one; one that is damaged is deleted."""
        copy = _copy_of(ref)
        try:
            os.utime(copy)  # used just now: last to be evicted
            if ref.sha256 not in self._checked:
                with copy.open("rb") as stream:
                    if hashlib.file_digest(stream, "sha256").hexdigest() != ref.sha256:
                        raise ValueError("its sha256 differs from the committed one")
                self._checked.add(ref.sha256)
            return _open(copy, ref)
        except FileNotFoundError:  # never fetched, or evicted by another process
            return None
        except ValueError as error:
            log.warning("%s is fetched again: its local copy is damaged (%s)", ref.url, error)
            copy.unlink(missing_ok=True)
            return None

    def _fetch(self, fs: AbstractFileSystem, path: str, ref: ShardRef) -> Path:
        """Copy a shard to its place in the cache; what may pass by itself is tried again."""
        copy = _copy_of(ref)
        copy.parent.mkdir(parents=True, exist_ok=True)
        _evict(copy.parent, self._cache_bytes - ref.size)
        for wait in (*WAITS, None):
            try:
                _download(fs, path, ref, copy)
                break
            except FileNotFoundError:
                raise
            except (OSError, ValueError) as error:
                if wait is None:
                    raise
                log.warning("%s could not be read (%s); again in %g s", ref.url, error, wait)
                time.sleep(wait)
        self._checked.add(ref.sha256)
        return copy


def _open(path: Path, ref: ShardRef) -> LatentShard:
    if (size := path.stat().st_size) != ref.size:
        raise ValueError(f"{size} bytes instead of {ref.size}")
    return LatentShard(path)


def _copy_of(ref: ShardRef) -> Path:
    """Named by its sha256: whoever downloads it, it is the same file."""
    return cache_folder() / "shards" / f"{ref.sha256}.safetensors"


def _download(fs: AbstractFileSystem, path: str, ref: ShardRef, target: Path) -> None:
    beside = target.with_name(f"{uuid.uuid4().hex}.tmp")
    digest = hashlib.sha256()
    try:
        with fs.open(path, "rb") as source, beside.open("wb") as sink:
            while chunk := source.read(CHUNK):
                digest.update(chunk)
                sink.write(chunk)
        if digest.hexdigest() != ref.sha256:
            raise ValueError("its sha256 differs from the committed one")
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def _evict(folder: Path, most: int) -> None:
    """Delete the files longest unused until `most` bytes are left; one that is mapped lives on."""
    found = []
    for path in folder.iterdir():
        try:
            stat = path.stat()
        except FileNotFoundError:  # another process evicts too
            continue
        if path.suffix != ".tmp" or time.time() - stat.st_mtime > ABANDONED:
            found.append((stat.st_mtime, stat.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= most:
            return
        path.unlink(missing_ok=True)
        total -= size
