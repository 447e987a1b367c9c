"""The event loop of this process's downloads, and what all shards of the process share."""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from artifacts.models import cache_folder
from artifacts.remote_stores import caching
from runtimes.process.launcher import count_cores
from runtimes.process.memory import collect_garbage_rarely, raise_open_file_limit
from tasks.download.body_memory import BodyMemory
from tasks.download.pace_requests_per_web_host import HostLimits
from tasks.download.robots_txt import RobotsCache

#: Bytes of the bodies that a process reads or keeps for decoding.
BODIES = 2**28
#: Files of a process beside its connections: of Python, Beam, the store and temporary files.
OTHER_FILES = 64
#: Files of a connection: its socket, one of another address, and one that waits for its host.
FILES = 3
log = logging.getLogger("kiln")
T = TypeVar("T")
_creation = threading.Lock()


@dataclass(frozen=True)
class Shared:
    """What all shards of a process share."""

    connections: asyncio.Semaphore  # of all hosts
    bodies: BodyMemory
    decoders: ThreadPoolExecutor  # decoding releases the interpreter lock
    hosts: HostLimits
    robots: RobotsCache


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, which runs in the loop beside those of other threads."""
    with _creation:
        loop = _loop()
    running = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return running.result()
    except BaseException:
        running.cancel()
        raise


def shared(max_connections: int) -> Shared:
    """The shared objects of this process, for a limit of connections."""
    folder = cache_folder()
    with caching(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _creation:
        return Shared(_connections(max_connections), *_of_process(), *_of_folder(folder))


@cache
def _loop() -> asyncio.AbstractEventLoop:
    collect_garbage_rarely()  # the searches took half of the loop's time
    gc.collect()
    gc.freeze()  # the search after each shard skips what imports made
    atexit.register(gc.unfreeze)  # DuckDB's bindings would list what is left as leaks
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="kiln-download", daemon=True).start()
    return loop


@cache
def _connections(limit: int) -> asyncio.Semaphore:
    files = raise_open_file_limit()
    most = max(1, (files - OTHER_FILES) // FILES)
    if most < limit:
        log.warning(
            "download: %d connections instead of download.max_connections, %d: this process may "
            "open %d files; raise the limit (`ulimit -n`)",
            *(most, limit, files),
        )
    return asyncio.Semaphore(min(limit, most))


@cache
def _of_process() -> tuple[BodyMemory, ThreadPoolExecutor]:
    threads = count_cores() + 1  # one of them waits for the interpreter lock
    decoders = ThreadPoolExecutor(threads, thread_name_prefix="kiln-decode")
    return BodyMemory(BODIES), decoders


@cache
def _of_folder(folder: Path) -> tuple[HostLimits, RobotsCache]:
    return HostLimits(folder / "hosts.lock"), RobotsCache(folder / "robots.sqlite")
