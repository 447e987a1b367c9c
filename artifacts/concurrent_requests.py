"""Many requests to a remote store at once, since each answer takes tens of milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

#: Requests in flight. S3's client opens so many connections, see `Store`.
AT_ONCE = 64
#: Items that are submitted together, which bounds the memory.
BATCH = 1024
Item = TypeVar("Item")
Answer = TypeVar("Answer")


def ask_at_once(
    fs: AbstractFileSystem,
    ask: Callable[[Item], Answer],
    items: Iterable[Item],
    at_once: int = AT_ONCE,
) -> Iterator[Answer]:
    """`ask(item)` for each item, in order; up to `at_once` threads ask a remote store.

    A local filesystem is asked one item after another. Raises as `ask` does.
    """
    if isinstance(fs, LocalFileSystem):
        yield from map(ask, items)
        return
    pending = iter(items)
    with ThreadPoolExecutor(at_once, thread_name_prefix="store") as pool:
        while batch := list(islice(pending, BATCH)):
            yield from pool.map(ask, batch)
