"""The files of a checkpoint's arrays: the ranks that write them; write, verify and open them."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import TypeVar

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from artifacts.records import FileEntry, file_fault, stamped
from artifacts.safetensors import StoredArray, read_arrays, write_arrays, writing
from runtimes.contract import Owners, State, StateShapes

#: Threads of each rank. One thread computes the sha256 of about 1 GB/s.
THREADS = 8
_FILE = re.compile(r"(?P<group>.+?)(-\d{5}-of-\d{5})?\.safetensors")
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class ArrayFile:
    """A safetensors file of arrays of one group."""

    path: str  # in the checkpoint's folder; shards have diffusers' names
    group: str
    names: tuple[str, ...]
    size: int  # bytes of the arrays


def array_files(shapes: StateShapes, most: int) -> list[ArrayFile]:
    """The files of a state; they do not depend on the number of ranks.

    Args:
        most: bytes of a file, except for a single larger array.
    """
    return [file for group in sorted(shapes) for file in _of_group(group, shapes[group], most)]


def _of_group(group: str, shapes: dict[str, tuple[int, ...]], most: int) -> list[ArrayFile]:
    parts: list[list[str]] = [[]]
    sizes = [0]
    for name in sorted(shapes):
        size = 4 * prod(shapes[name])
        if parts[-1] and sizes[-1] + size > most:
            parts.append([])
            sizes.append(0)
        parts[-1].append(name)
        sizes[-1] += size
    count = len(parts)
    numbers = [f"-{n:05d}-of-{count:05d}" if count > 1 else "" for n in range(1, count + 1)]
    return [
        ArrayFile(f"{group}{number}.safetensors", group, tuple(names), size)
        for number, names, size in zip(numbers, parts, sizes, strict=True)
    ]


def files_by_rank(files: list[ArrayFile], world: int) -> list[list[ArrayFile]]:
    """The files that each rank writes: the largest first, to the rank with the fewest bytes."""
    found: list[list[ArrayFile]] = [[] for _ in range(world)]
    loads = [(0, rank) for rank in range(world)]
    for file in sorted(files, key=lambda file: (-file.size, file.path)):
        load, rank = heapq.heappop(loads)
        found[rank].append(file)
        heapq.heappush(loads, (load + file.size, rank))
    return found


def owners(files: list[list[ArrayFile]]) -> Owners:
    """Runtime.state's owners for `files_by_rank`."""
    found: dict[str, dict[str, int]] = {}
    for rank, own in enumerate(files):
        for file in own:
            found.setdefault(file.group, {}).update(dict.fromkeys(file.names, rank))
    return found


def write_files(
    fs: AbstractFileSystem,
    path: str,
    files: Sequence[ArrayFile],
    state: State,
    check: Callable[[], None] | None,
) -> list[FileEntry]:
    """Write files of a checkpoint's folder; a file in a bucket has the bucket's checksum.

    Args:
        check: as of `writing`.
    """

    def write(file: ArrayFile) -> FileEntry:
        entries: list[FileEntry] = []
        with writing(fs, path, file.path, entries, check) as sink:
            write_arrays(sink, {name: state[file.group][name] for name in file.names})
        return entries[0] if isinstance(fs, LocalFileSystem) else stamped(fs, path, entries)[0]

    return _in_threads(write, files)


def verify_files(fs: AbstractFileSystem, path: str, files: Sequence[FileEntry]) -> None:
    """Raise ValueError for the first file that differs from its entry."""
    for fault in _in_threads(lambda entry: file_fault(fs, path, entry), files):
        if fault is not None:
            raise ValueError(fault)


def open_arrays(
    fs: AbstractFileSystem, path: str, files: Sequence[FileEntry]
) -> dict[str, dict[str, StoredArray]]:
    """The arrays of a checkpoint's folder, by group and name. Only headers are read."""
    matches = [match for entry in files if (match := _FILE.fullmatch(entry.path))]
    opened = _in_threads(lambda match: read_arrays(fs, f"{path}/{match[0]}"), matches)
    state: dict[str, dict[str, StoredArray]] = {}
    for match, arrays in zip(matches, opened, strict=True):
        state.setdefault(match["group"], {}).update(arrays)
    return state


def _in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """The results of `work` for all items; the first error cancels what has not begun."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint-file") as pool:
        return list(pool.map(work, items))
