"""Truncate and flip files of a store, and restore them."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field

from chaos.faults import Fault

from artifacts.filesystems import files
from artifacts.store import Store


@dataclass(frozen=True)
class Damage:
    """A file that was damaged, and its bytes before and after."""

    path: str  # on the store's filesystem
    before: bytes
    after: bytes
    #: Seconds of the machine's monotonic clock.
    when: float = field(default_factory=time.monotonic)


def damage(store: Store, fault: Fault) -> Damage | None:
    """Damage one file; None if there is none, or if it is deleted in this moment."""
    with suppress(FileNotFoundError):
        paths = sorted(e["name"] for e in files(store.fs, store.root) if _may_be_damaged(e["name"]))
        if not paths:
            return None
        path = paths[int(fault.choice * len(paths))]
        data = store.fs.cat_file(path)
        if not data:
            return None
        at = int(fault.choice * 1e6) % len(data)
        after = data[:at]
        if fault.kind == "file flipped":
            after += bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        _overwrite(store, path, after, keep_stamp=fault.choice * 1e6 % 2 < 1)
        return Damage(path, data, after)
    return None


def restore(store: Store, found: Damage) -> None:
    """Write a file's bytes again if nobody has mended it."""
    with suppress(FileNotFoundError):
        if store.fs.cat_file(found.path) == found.after:
            store.fs.pipe_file(found.path, found.before)


def _may_be_damaged(path: str) -> bool:
    name = path.rpartition("/")[2]
    return not name.startswith("champion") and not name.endswith(".tmp")


def _overwrite(store: Store, path: str, data: bytes, *, keep_stamp: bool) -> None:
    if not store.is_local:
        store.fs.pipe_file(path, data)
        return
    stat = os.stat(path)
    with open(path, "r+b") as stream:
        stream.truncate()
        stream.write(data)
    if keep_stamp and len(data) == stat.st_size:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
