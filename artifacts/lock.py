"""One builder per key: a lock file with a heartbeat, on any store."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fsspec import AbstractFileSystem

from artifacts.clock import REAL, Clock

log = logging.getLogger("kiln")
HEARTBEAT_SECONDS = 5.0
#: A lock whose heartbeat has not moved for this long belonged to a builder that died.
EXPIRY_SECONDS = 30.0
#: Who takes over a dead lock waits this long for others who were about to, then looks whose it is.
SETTLE_SECONDS = 0.25


@contextmanager
def hold(
    fs: AbstractFileSystem,
    path: str,
    *,
    waiting: Callable[[dict[str, Any]], None] = lambda owner: None,
    expiry: float = EXPIRY_SECONDS,
    heartbeat: float = HEARTBEAT_SECONDS,
    clock: Clock = REAL,
) -> Iterator[None]:
    """Hold the lock at `path`, waiting for its holder; take it over from one that died.

    A holder on this host is known dead when its process is gone; one elsewhere, when its heartbeat
    has not moved for `expiry` seconds of our own `clock` (so clocks need not agree).
    `waiting(owner)` is called once when there is someone to wait for.
    """
    mine = {"token": uuid.uuid4().hex, **_this_process(), "beat": 0}
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    _acquire(fs, path, mine, waiting, expiry, clock)
    stop = threading.Event()
    pulse = threading.Thread(target=_beat, args=(fs, path, mine, stop, heartbeat), daemon=True)
    pulse.start()
    try:
        yield
    finally:
        stop.set()
        pulse.join()
        owner = read_owner(fs, path)
        if owner is not None and owner.get("token") == mine["token"]:
            fs.rm_file(path)


def read_owner(fs: AbstractFileSystem, path: str) -> dict[str, Any] | None:
    """Who holds the lock; None when nobody does. One half written reads as an empty owner."""
    try:
        owner = json.loads(fs.cat_file(path))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def is_dead(owner: dict[str, Any]) -> bool:
    """Whether the owner ran on this host and its process is gone."""
    here = _this_process()
    if any(owner.get(name) != here[name] for name in ("host", "pids")) or "pid" not in owner:
        return False
    return _process_start(owner["pid"]) != owner.get("started")


def _acquire(
    fs: AbstractFileSystem,
    path: str,
    mine: dict[str, Any],
    waiting: Callable[[dict[str, Any]], None],
    expiry: float,
    clock: Clock,
) -> None:
    told, seen, since, settle = False, None, clock.now(), 0.0
    while not _create(fs, path, mine, settle, clock):
        owner = read_owner(fs, path)
        if owner is None:
            continue
        if owner != seen:
            seen, since = owner, clock.now()
        if is_dead(owner) or clock.now() - since > expiry:
            _discard(fs, path, owner)
            settle = SETTLE_SECONDS
            continue
        if owner and not told:  # one half written names nobody yet
            waiting(owner)
            told = True
        clock.sleep(min(0.5, expiry / 4))


def _create(
    fs: AbstractFileSystem, path: str, mine: dict[str, Any], settle: float, clock: Clock
) -> bool:
    try:
        fs.pipe_file(path, json.dumps(mine).encode(), mode="create")
    except FileExistsError:
        return False
    # Two who saw the same dead owner may both have removed a lock: the later one's token stands.
    clock.sleep(settle)
    owner = read_owner(fs, path)
    return owner is not None and owner.get("token") == mine["token"]


def _discard(fs: AbstractFileSystem, path: str, owner: dict[str, Any]) -> None:
    """Remove a dead owner's lock, unless somebody else has taken it over meanwhile."""
    if read_owner(fs, path) == owner:
        with suppress(FileNotFoundError):
            fs.rm_file(path)


def _beat(
    fs: AbstractFileSystem,
    path: str,
    mine: dict[str, Any],
    stop: threading.Event,
    seconds: float,
) -> None:
    while not stop.wait(seconds):
        try:
            owner = read_owner(fs, path)
            if owner and owner.get("token") != mine["token"]:
                return  # taken over while we slept past the expiry: it is theirs now
            mine["beat"] += 1
            # One that somebody has just removed as dead is not put back over the remover's own.
            mode = "create" if owner is None else "overwrite"
            fs.pipe_file(path, json.dumps(mine).encode(), mode=mode)
        except Exception as error:  # of any kind, as stores have; the next beat may come through
            log.warning("lock %s: %s", path, error)


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    try:
        pids = os.readlink("/proc/self/ns/pid")  # containers of one host name count apart
    except OSError:
        pids = ""
    started = _process_start(pid)
    return {"host": socket.gethostname(), "pids": pids, "pid": pid, "started": started}


def _process_start(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot, which tells a reused pid apart."""
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[19]
    except OSError:
        try:  # no /proc: existence is all that can be told
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except OSError:
            pass
        return "unknown"
