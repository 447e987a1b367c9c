"""The shards being read: mapped into memory, remote ones first copied to a bounded folder."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from artifacts.latents import LatentShard, ShardRef
from artifacts.models import cache_folder
from runtimes.base import WrongInput

CHUNK = 2**20


class ShardFiles:
    """Opens shards by number; at most `open_limit` are mapped, the longest unused is closed.

    Args:
        cache_bytes: how much of a remote store is kept locally, least recently used out first.
    """

    def __init__(self, refs: Sequence[ShardRef], *, open_limit: int, cache_bytes: int) -> None:
        self._refs, self._open_limit, self._cache_bytes = refs, open_limit, cache_bytes
        self._open: OrderedDict[int, LatentShard] = OrderedDict()

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
            local = Path(path) if isinstance(fs, LocalFileSystem) else self._fetch(fs, path, ref)
            if local.stat().st_size != ref.size:
                raise ValueError(f"{local.stat().st_size} bytes instead of {ref.size}")
            return LatentShard(local)
        except (OSError, ValueError) as error:
            raise WrongInput(
                f"latent shard {ref.url} cannot be used ({error}); run the flow again to rebuild it"
            ) from None

    def _fetch(self, fs: AbstractFileSystem, path: str, ref: ShardRef) -> Path:
        """A local copy, named by its sha256: whoever downloads it, it is the same file."""
        folder = cache_folder() / "shards"
        target = folder / f"{ref.sha256}.safetensors"
        if target.exists():
            os.utime(target)  # used just now: last to be evicted
            return target
        folder.mkdir(parents=True, exist_ok=True)
        _evict(folder, self._cache_bytes - ref.size)
        beside = folder / f"{uuid.uuid4().hex}.tmp"
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
        return target


def _evict(folder: Path, most: int) -> None:
    """Delete the files longest unused until `most` bytes are left; one that is mapped lives on."""
    found = []
    for path in folder.iterdir():
        try:
            stat = path.stat()
        except FileNotFoundError:  # another process evicts too
            continue
        found.append((stat.st_mtime, stat.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= most:
            return
        path.unlink(missing_ok=True)
        total -= size
