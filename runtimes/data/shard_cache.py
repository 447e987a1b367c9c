"""Memory-mapped latent shards; remote shards go through a local cache of bounded size.

Background threads fetch files that will be needed, and block no exit of the process. Rows that stay
in memory are read again without opening their shard.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from numpy.typing import NDArray

from artifacts.errors import is_forbidden, is_full, is_of_client, refusals, retrying
from artifacts.latent_shards import LatentSample, LatentShard, ShardRef
from artifacts.models import cache_folder
from artifacts.records import Damaged, open_checked
from configs.errors import Refused

#: Files that are fetched at the same time.
THREADS = 4
log = logging.getLogger("kiln")


class ReadAhead:
    """Calls `fetch(number)` in daemon threads, for the numbers that were asked for last.

    An error is only logged: a reader that needs the file fetches it again, and raises.
    """

    def __init__(self, fetch: Callable[[int], None]) -> None:
        self._fetch = fetch
        self._numbers: list[int] = []
        self._changed = threading.Condition()
        self._closed = False
        for number in range(THREADS):
            threading.Thread(target=self._run, name=f"read-ahead-{number}", daemon=True).start()

    def replace(self, numbers: Iterable[int]) -> None:
        """Fetch these in order, and none of the earlier ones that are still waiting."""
        with self._changed:
            self._numbers = list(numbers)
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads once they have fetched what they are at."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (number := self._next()) is not None:
            try:
                self._fetch(number)
            except Exception as error:
                log.debug("shard %d was not read ahead: %s", number, error)

    def _next(self) -> int | None:
        """The next number; None once this is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._numbers or self._closed)
            return None if self._closed else self._numbers.pop(0)


CHUNK = 2**20
EVICTION = "eviction"  # name of the lock under which room is made in the cache
#: Seconds before each retry of a download.
WAITS = (1.0, 5.0, 30.0)


class ShardFiles:
    """Open shards by number, at most `open_limit` of them; the least recently used one is closed.

    Args:
        open_limit: may be raised later.
        cache_bytes: size limit of the local cache; the least recently used files are deleted.
    """

    def __init__(self, refs: Sequence[ShardRef], *, open_limit: int, cache_bytes: int) -> None:
        self._refs = refs
        self.open_limit = open_limit
        self._cache_bytes = cache_bytes
        self._open: OrderedDict[int, LatentShard] = OrderedDict()
        self._ahead: ReadAhead | None = None
        self._checked: set[str] = set()  # sha256 of the files that this process verified
        #: sha256 of a local file -> lock of the thread that reads it.
        self._checking: dict[str, threading.Lock] = {}

    def __getitem__(self, number: int) -> LatentShard:
        """The open shard. Raises Refused with the file's URL if it is missing or damaged."""
        shard = self._open.get(number)
        if shard is None:
            shard = self._open[number] = self._load(self._refs[number])
            while len(self._open) > self.open_limit:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(number)
        return shard

    def read_ahead(self, numbers: Sequence[int]) -> None:
        """Fetch remote shards to the cache and verify local ones, in order, in the background.

        They have half of the cache at most: the other half is for the shards in use.
        """
        sizes = np.cumsum([self._refs[number].size for number in numbers])
        wanted = numbers[: int(np.searchsorted(sizes, self._cache_bytes // 2, side="right"))]
        if wanted and self._ahead is None:
            self._ahead = ReadAhead(self._fetch_ahead)
        if self._ahead is not None:
            self._ahead.replace(wanted)

    def close_others(self, numbers: Set[int]) -> None:
        """Close all shards but these: a deleted file is on the disk for as long as it is open."""
        for number in self._open.keys() - numbers:
            self._open.pop(number).close()

    def _fetch_ahead(self, number: int) -> None:
        ref = self._refs[number]
        fs, path = url_to_fs(ref.url)
        if isinstance(fs, LocalFileSystem):
            self._verify(path, ref)
            return
        try:
            os.utime(_cache_path(ref))  # wanted soon: an eviction takes the oldest
        except FileNotFoundError:
            self._fetch(fs, path, ref)

    def close(self) -> None:
        """Unmap every shard."""
        if self._ahead is not None:
            self._ahead.close()
        while self._open:
            self._open.popitem()[1].close()

    def _load(self, ref: ShardRef) -> LatentShard:
        try:
            fs, path = url_to_fs(ref.url)
            if isinstance(fs, LocalFileSystem):
                local = _open(Path(path), ref)
                self._verify(path, ref)
                return local
            shard = self._cached(ref)
            while shard is None:
                copy = self._fetch(fs, path, ref)
                # Another process, which waits for room in a small cache, may evict it at once.
                with suppress(FileNotFoundError):
                    shard = _open(copy, ref)
            return shard
        except Damaged as error:
            raise Refused(f"latent shard {error}") from None
        except (FileNotFoundError, ValueError) as error:
            raise Refused(
                f"latent shard {ref.url} cannot be used ({error}); run the flow again to rebuild it"
            ) from None

    def _verify(self, path: str, ref: ShardRef) -> None:
        """Read a local shard at its first opening. Raises Damaged if it differs from the commit."""
        with self._checking.setdefault(ref.sha256, threading.Lock()):
            if ref.sha256 not in self._checked:
                with open_checked(path, ref.sha256):
                    pass
                self._checked.add(ref.sha256)

    def _cached(self, ref: ShardRef) -> LatentShard | None:
        """The local copy, or None; a damaged copy is deleted."""
        copy = _cache_path(ref)
        try:
            os.utime(copy)  # eviction is by modification time
            if ref.sha256 not in self._checked:
                with copy.open("rb") as stream:
                    if hashlib.file_digest(stream, "sha256").hexdigest() != ref.sha256:
                        raise ValueError("its sha256 differs from the committed one")
                self._checked.add(ref.sha256)
            return _open(copy, ref)
        except FileNotFoundError:  # never fetched, or evicted by another process
            return None
        except ValueError as error:
            log.warning("%s is downloaded again: its local copy is damaged (%s)", ref.url, error)
            copy.unlink(missing_ok=True)
            return None

    def _fetch(self, fs: AbstractFileSystem, path: str, ref: ShardRef) -> Path:
        """Download a shard to the cache, with retries of transient errors.

        One thread or process of a host downloads it; others that need it wait.
        """

        def download() -> None:
            with _reserved(copy, ref.size, self._cache_bytes) as partial, refusals():
                _download(fs, path, ref, partial)

        copy = _cache_path(ref)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with _lock(copy.stem):
            if not copy.exists():
                retrying(
                    download,
                    WAITS,
                    passes=_may_be_transient,
                    words=lambda error: f"{ref.url} could not be read ({error})",
                )
                self._checked.add(ref.sha256)
        return copy


def _may_be_transient(error: Exception) -> bool:
    """Whether a later try may succeed; a ValueError means bytes that were damaged on their way."""
    if isinstance(error, FileNotFoundError) or is_forbidden(error):
        return False
    return isinstance(error, OSError | ValueError) or is_of_client(error)


def _lock(name: str) -> FileLock:
    """A lock among the threads and processes of this host; a dead process frees its locks."""
    folder = cache_folder() / "shard-locks"
    folder.mkdir(exist_ok=True)
    return FileLock(folder / name)


@contextmanager
def _reserved(copy: Path, size: int, limit: int) -> Iterator[Path]:
    """A temporary file of `size` bytes, which becomes `copy`; older copies make room for it first.

    It has its final size from the start, so concurrent downloads count each other. Its lock ends
    with the process, and tells a download from the rest of a killed download. It is renamed under
    the lock of evictions, which would otherwise miss it under both names.
    """
    partial = copy.with_name(f"{uuid.uuid4().hex}.tmp")
    with ExitStack() as held:
        with _lock(EVICTION):
            _evict(copy.parent, limit, size)
            held.callback(partial.unlink, missing_ok=True)
            file = held.enter_context(partial.open("wb"))
            fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(size)
        try:
            yield partial
        except OSError as error:
            if is_full(error) and error.filename is None:
                error.filename = str(copy)  # a write's error names no file
            raise
        held.enter_context(_lock(EVICTION))
        partial.replace(copy)


def _is_locked(path: Path) -> bool:
    with suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _open(path: Path, ref: ShardRef) -> LatentShard:
    if (size := path.stat().st_size) != ref.size:
        raise ValueError(f"{size} bytes instead of {ref.size}")
    return LatentShard(path)


def _cache_path(ref: ShardRef) -> Path:
    """The path in the cache. The name is the sha256, so concurrent downloads agree."""
    return cache_folder() / "shards" / f"{ref.sha256}.safetensors"


def _download(fs: AbstractFileSystem, path: str, ref: ShardRef, target: Path) -> None:
    digest = hashlib.sha256()
    with fs.open(path, "rb") as source, target.open("r+b") as sink:
        while chunk := source.read(CHUNK):
            digest.update(chunk)
            sink.write(chunk)
    if digest.hexdigest() != ref.sha256:
        raise ValueError("its sha256 differs from the committed one")


def _evict(folder: Path, limit: int, room: int) -> None:
    """Delete what killed downloads left, and the least recently used files until `room` bytes fit.

    All files together have at most `limit` bytes, or what their disk has for them if that is less.
    A deleted file that is memory-mapped stays readable until it is unmapped.
    """
    total = 0
    taken = 0
    deletable = []
    for path in folder.iterdir():
        try:
            stat = path.stat()
        except FileNotFoundError:  # a download ended, or was abandoned, since the listing
            continue
        if path.suffix == ".tmp" and not _is_locked(path):
            path.unlink(missing_ok=True)
            continue
        total += stat.st_size
        taken += 512 * stat.st_blocks  # a download counts by the bytes that have arrived
        if path.suffix != ".tmp":
            deletable.append((stat.st_mtime, stat.st_size, path))
    limit = min(limit, taken + shutil.disk_usage(folder).free)
    for _, size, path in sorted(deletable):
        if total + room <= limit:
            return
        path.unlink(missing_ok=True)
        total -= size


T = TypeVar("T")


class KeptRows:
    """Shards by number, of which rows that were read once stay in memory.

    Args:
        limit: maximum bytes of the kept arrays; rows beyond it are read from their shard each time.
    """

    def __init__(self, files: ShardFiles, limit: int) -> None:
        self._files = files
        self._left = limit
        self._kept: dict[tuple[object, ...], Any] = {}

    def __getitem__(self, number: int) -> KeptShard:
        return KeptShard(self, number)

    def read(self, number: int, place: tuple[object, ...], get: Callable[[LatentShard], T]) -> T:
        """The result of `get` for a shard, kept by `place`. Raises as ShardFiles and `get`."""
        key = (number, *place)
        if key in self._kept:
            kept: T = self._kept[key]
            return kept
        value = get(self._files[number])
        if (size := _array_bytes(value)) <= self._left:
            self._left -= size
            self._kept[key] = value
        return value


class KeptShard:
    """A LatentShard for a BatchReader; opens the shard only for rows that were not read before."""

    def __init__(self, rows: KeptRows, number: int) -> None:
        self._rows = rows
        self._number = number

    def _read(self, place: tuple[object, ...], get: Callable[[LatentShard], T]) -> T:
        return self._rows.read(self._number, place, get)

    @property
    def path(self) -> Path:
        return self._read(("path",), lambda shard: shard.path)

    @property
    def groups(self) -> dict[str, int]:
        return self._read(("groups",), lambda shard: shard.groups)

    def sample(self, group: str, index: int) -> LatentSample:
        return self._read(("sample", group, index), lambda shard: shard.sample(group, index))

    def prompt_embeds(self, row: int) -> NDArray[np.uint16]:
        return self._read(("prompt_embeds", row), lambda shard: shard.prompt_embeds(row))

    def pooled_prompt_embeds(self, row: int) -> NDArray[np.uint16] | None:
        return self._read(("pooled", row), lambda shard: shard.pooled_prompt_embeds(row))

    def input_ids(self, row: int) -> NDArray[np.int32]:
        return self._read(("input_ids", row), lambda shard: shard.input_ids(row))


def _array_bytes(value: object) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if not isinstance(value, LatentSample):
        return 0
    masked = [] if value.masked is None else [value.masked.masks, value.masked.means]
    masked += [array for array in (value.loss_mask, value.control) if array is not None]
    return sum(array.nbytes for array in (value.mean, value.logvar, *masked))
