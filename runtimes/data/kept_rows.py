"""Rows of latent shards that stay in memory, so that reading them again opens no shard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from artifacts.latent_shards import LatentSample, LatentShard
from runtimes.data.shard_cache import ShardFiles

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
        """What `get` returns of a shard; `place` identifies it. Raises as ShardFiles and `get`."""
        key = (number, *place)
        if key in self._kept:
            kept: T = self._kept[key]
            return kept
        found = get(self._files[number])
        if (size := _array_bytes(found)) <= self._left:
            self._left -= size
            self._kept[key] = found
        return found


class KeptShard:
    """What a BatchReader reads of a LatentShard; opens the shard for what was not read before."""

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


def _array_bytes(found: object) -> int:
    if isinstance(found, np.ndarray):
        return found.nbytes
    if not isinstance(found, LatentSample):
        return 0
    masked = [] if found.masked is None else [found.masked.masks, found.masked.means]
    return sum(array.nbytes for array in (found.mean, found.logvar, *masked))
