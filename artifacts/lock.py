"""A lock file with a heartbeat, on any fsspec store: one builder per key."""

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
#: A lock without a heartbeat for this long has expired: its owner is dead.
EXPIRY_SECONDS = 30.0
#: Delay between the takeover of a dead lock and the check that no other process took it over too.
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
    """Acquire the lock at `path`, wait while another process owns it, and release it on exit.

    A dead owner loses the lock. An owner on this host is dead when its process has ended. Any other
    owner is dead when its heartbeat stands still for `expiry` seconds of our own `clock`, so clocks
    of different hosts need not agree.

    Args:
        waiting: called once with the owner's record, if there is an owner to wait for.
        expiry: seconds without a heartbeat.
        heartbeat: seconds between our own heartbeats.
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
    """The owner's record; None if the lock is free, {} if the record is incomplete."""
    try:
        owner = json.loads(fs.cat_file(path))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def is_dead(owner: dict[str, Any]) -> bool:
    """Whether the owner ran on this host and its process has ended."""
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
    notified, seen, since, settle = False, None, clock.now(), 0.0
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
        if owner and not notified:  # an incomplete record names no owner
            waiting(owner)
            notified = True
        clock.sleep(min(0.5, expiry / 4))


def _create(
    fs: AbstractFileSystem, path: str, mine: dict[str, Any], settle: float, clock: Clock
) -> bool:
    try:
        fs.pipe_file(path, json.dumps(mine).encode(), mode="create")
    except FileExistsError:
        return False
    # Two processes that found the same dead owner may both get here. The last token wins.
    clock.sleep(settle)
    owner = read_owner(fs, path)
    return owner is not None and owner.get("token") == mine["token"]


def _discard(fs: AbstractFileSystem, path: str, owner: dict[str, Any]) -> None:
    """Remove a dead owner's lock, unless another process has replaced its record."""
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
                return  # another process took the lock over after our heartbeat expired
            mine["beat"] += 1
            # A missing lock was removed as dead. "create" cannot overwrite the remover's record.
            mode = "create" if owner is None else "overwrite"
            fs.pipe_file(path, json.dumps(mine).encode(), mode=mode)
        except Exception as error:  # stores raise any type; the next heartbeat may succeed
            log.warning("lock %s: %s", path, error)


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    try:
        pids = os.readlink("/proc/self/ns/pid")  # separates containers with equal host names
    except OSError:
        pids = ""
    started = _process_start(pid)
    return {"host": socket.gethostname(), "pids": pids, "pid": pid, "started": started}


def _process_start(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot; it distinguishes reused pids."""
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[19]
    except OSError:
        try:  # without /proc only the existence of the process is known
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except OSError:
            pass
        return "unknown"
