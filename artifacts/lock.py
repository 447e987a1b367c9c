"""A lock with a heartbeat, on any store: one builder per key, and it learns when it lost the lock.

The file holds the owner's record, or `null` when the lock is free. Every change is a
compare-and-swap: acquisition, heartbeat, take-over and release.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem

from artifacts.compare_and_swap import VersionedContent, read, swap
from artifacts.filesystems import REAL, Clock, make_folder_of
from artifacts.records import parse_json
from configs.errors import Failed

log = logging.getLogger("kiln")
HEARTBEAT_SECONDS = 5.0
#: A lock without a heartbeat for this long has expired: its owner is dead.
EXPIRY_SECONDS = 30.0
_FREE = b"null"
_UNKNOWN = "unknown"  # start of a process that exists, where /proc does not show it
#: Tokens of locks that this process has left but could not release, as on a full disk.
_left: set[str] = set()


class LockLost(Failed):
    """Another process took the lock over; nothing more may be written under it."""


@dataclass(frozen=True)
class Claim:
    """What other processes need to see whether their builder still holds its lock."""

    path: str
    token: str

    def check(self, fs: AbstractFileSystem) -> None:
        """Raise LockLost if the store names another owner. Raises as the filesystem does."""
        if (read_owner(fs, self.path) or {}).get("token") != self.token:
            raise _lost(self.path)


class Lock:
    """A lock that this process holds.

    Attributes:
        lost: set as soon as a heartbeat finds another owner.
    """

    def __init__(
        self,
        fs: AbstractFileSystem,
        path: str,
        lease: float,
        clock: Clock,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.lost = threading.Event()
        self._fs = fs
        self._path = path
        self._lease = lease
        self._clock = clock
        self._owner = {**(facts or {}), "token": uuid.uuid4().hex, **_this_process(), "beat": 0}
        self._alone = threading.Lock()  # the heartbeat and the builder both renew
        self._state = VersionedContent(None, None)
        self._renewed = clock.now()

    def acquire(self, on_wait: Callable[[dict[str, Any]], None], expiry: float) -> None:
        """Become the owner once there is none that is alive. Arguments as of `hold`."""
        notified = None
        seen = None
        since = self._clock.now()
        make_folder_of(self._fs, self._path)
        while True:
            state = read(self._fs, self._path)
            if state != seen:
                seen = state
                since = self._clock.now()
            owner = _owner_of(state)
            if owner is None or is_dead(owner) or self._clock.now() - since > expiry:
                if self.take(state):
                    return
                make_folder_of(self._fs, self._path)  # it may have been deleted
                continue
            if owner and owner.get("token", "") != notified:  # an incomplete record names no owner
                notified = owner.get("token", "")
                on_wait(owner)
            self._clock.sleep(min(0.5, expiry / 4))

    def take(self, seen: VersionedContent) -> bool:
        """Become the owner if the lock's state is still `seen`."""
        now = self._clock.now()
        state = swap(self._fs, self._path, seen, json.dumps(self._owner).encode())
        if state is None:
            return False
        self._state = state
        self._renewed = now
        return True

    def check(self) -> None:
        """Raise LockLost unless this process is still the owner.

        The store is asked only if the last heartbeat is older than half the expiry, as after a
        pause of this process.
        """
        if self._clock.now() - self._renewed > self._lease:
            self.renew()
        if self.lost.is_set():
            raise _lost(self._path)

    @property
    def claim(self) -> Claim:
        """What the builder's helpers check."""
        return Claim(self._path, self._owner["token"])

    def renew(self) -> None:
        """Send a heartbeat; set `lost` if there is another owner. Raises as the filesystem does."""
        with self._alone:
            self._owner["beat"] += 1
            while not self.lost.is_set() and not self.take(self._state):
                # An earlier heartbeat may have got through although its answer was an error.
                self._state = read(self._fs, self._path)
                if (_owner_of(self._state) or {}).get("token") != self._owner["token"]:
                    self.lost.set()

    def write(self, path: str, data: bytes) -> None:
        """Replace a file on the lock's remote store; LockLost, and no change, if the lock was lost.

        The request is conditional: if it was under way in a pause, it changes no later file.
        """
        while True:
            seen = read(self._fs, path)
            self.check()
            if swap(self._fs, path, seen, data):
                return
            self.renew()

    def release(self) -> None:
        """Free the lock if it is still ours. Raises as the filesystem does."""
        if self.lost.is_set() or swap(self._fs, self._path, self._state, _FREE) is not None:
            return
        self.renew()  # an earlier heartbeat may have got through although its answer was an error
        if not self.lost.is_set():
            swap(self._fs, self._path, self._state, _FREE)


def _lost(path: str) -> LockLost:
    return LockLost(f"{path}: another process took the lock over; run again")


_held: ContextVar[Lock | None] = ContextVar("held", default=None)


@contextmanager
def hold(
    fs: AbstractFileSystem,
    path: str,
    *,
    on_wait: Callable[[dict[str, Any]], None] = lambda owner: None,
    facts: Mapping[str, Any] | None = None,
    expiry: float = EXPIRY_SECONDS,
    heartbeat: float = HEARTBEAT_SECONDS,
    clock: Clock = REAL,
) -> Iterator[Lock]:
    """Acquire the lock at `path`, wait while another process owns it, and release it on exit.

    A dead owner loses the lock. An owner on this host is dead when its process has ended. Any other
    owner is dead when its heartbeat stands still for `expiry` seconds of our own `clock`, so clocks
    of different hosts need not agree.

    Args:
        on_wait: called with the record of each owner that is waited for.
        facts: added to our own record.
        expiry: seconds without a heartbeat.
        heartbeat: seconds between our own heartbeats.
    """
    lock = Lock(fs, path, expiry / 2, clock, facts)
    lock.acquire(on_wait, expiry)
    with _kept(lock, path, heartbeat):
        before = _held.set(lock)
        try:
            yield lock
        finally:
            _held.reset(before)


def owner_in_words(owner: Mapping[str, Any]) -> str:
    """The owner of a lock for a message, such as `process 12 on node-3`."""
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"


def wait_until_free(
    fs: AbstractFileSystem, path: str, on_wait: Callable[[dict[str, Any]], None]
) -> None:
    """Return when nobody owns the lock: its owner has released it, or lost it to this process."""
    if read_owner(fs, path) is not None:
        with hold(fs, path, on_wait=on_wait):
            pass


def is_owned(fs: AbstractFileSystem, path: str) -> bool:
    """Whether the lock has an owner that is not known to be dead; its heartbeat is not awaited."""
    owner = read_owner(fs, path)
    return owner is not None and not is_dead(owner)


def is_alive(fs: AbstractFileSystem, path: str, *, clock: Clock = REAL) -> bool:
    """Whether a living process owns the lock. It waits up to EXPIRY_SECONDS for a beat."""
    seen = read(fs, path)
    since = clock.now()
    state = seen
    while (owner := _owner_of(state)) is not None and not is_dead(owner):
        if state != seen:
            return True
        if clock.now() - since > EXPIRY_SECONDS:
            return False
        clock.sleep(min(0.5, EXPIRY_SECONDS / 4))
        state = read(fs, path)
    return False


def check_held(*, ask: bool = False) -> None:
    """Raise LockLost if the lock that this thread holds was lost.

    Args:
        ask: whether to ask the store; otherwise the last heartbeat decides.
    """
    lock = _held.get()
    if lock is not None and ask:
        _try(lock.renew, lock.claim.path)
    if lock is not None and lock.lost.is_set():
        lock.check()


def held_claim() -> Claim | None:
    """The claim of the lock that this thread holds; None if it holds none."""
    lock = _held.get()
    return None if lock is None else lock.claim


@contextmanager
def seize(fs: AbstractFileSystem, path: str, seen: VersionedContent) -> Iterator[Lock | None]:
    """Acquire the lock, whoever owned it, if its state is still `seen`; otherwise give None."""
    lock = Lock(fs, path, EXPIRY_SECONDS / 2, REAL)
    if not lock.take(seen):
        yield None
        return
    with _kept(lock, path, HEARTBEAT_SECONDS):
        yield lock


@contextmanager
def _kept(lock: Lock, path: str, heartbeat: float) -> Iterator[None]:
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(heartbeat) and not lock.lost.is_set():
            _try(lock.renew, path)

    pulse = threading.Thread(target=beat, daemon=True)
    pulse.start()
    try:
        yield
    finally:
        stop.set()
        pulse.join()
        if not _try(lock.release, path):  # what was built is committed: others await the expiry
            _left.add(lock.claim.token)


def read_owner(fs: AbstractFileSystem, path: str) -> dict[str, Any] | None:
    """The owner's record; None if the lock is free, {} if the record is incomplete."""
    return _owner_of(read(fs, path))


def is_dead(owner: dict[str, Any]) -> bool:
    """Whether the owner ran on this host, since it was last started, and its process has ended.

    Also dead is an owner of this process that could not release its lock.
    """
    if owner.get("token") in _left:
        return True
    here = _this_process()
    if any(owner.get(name) != here[name] for name in ("host", "boot", "pids")):
        return False
    if "pid" not in owner:
        return False
    started = _process_start(owner["pid"])
    # Under hidepid, another user's process exists but shows no start: it may be this owner.
    return started != owner.get("started") and started != _UNKNOWN


def _owner_of(state: VersionedContent) -> dict[str, Any] | None:
    if state.data in (None, _FREE):
        return None
    try:
        owner = parse_json(state.data or b"")
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _try(act: Callable[[], None], path: str) -> bool:
    try:
        act()
    except Exception as error:  # stores raise any type; the next heartbeat may succeed
        log.warning("lock %s: %s", path, error)
        return False
    return True


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    process = {"host": socket.gethostname(), "boot": "", "pids": "", "pid": pid}
    with suppress(OSError):  # separates machines with equal host names
        process["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):  # separates containers of one machine
        process["pids"] = os.readlink("/proc/self/ns/pid")
    return {**process, "started": _process_start(pid)}


def _process_start(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot; it distinguishes reused pids."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    try:  # without /proc only the existence of the process is known
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return _UNKNOWN
