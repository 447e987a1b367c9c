"""One builder per key, and a dead builder's lock does not hold anybody up."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from fsspec.core import url_to_fs
from store_servers import REMOTE, UrlOf
from waiting import at_once, wait_until

from artifacts import compare_and_swap as cas
from artifacts import lock
from artifacts.compare_and_swap import VersionedContent
from artifacts.filesystems import REAL, Clock


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, url_of: UrlOf):
    fs, root = url_to_fs(url_of(request.param))
    return fs, f"{root}/stage/lock.json"


@pytest.fixture(params=["local", "memory", *REMOTE])
def any_place(request: pytest.FixtureRequest, url_of: UrlOf):
    fs, root = url_to_fs(url_of(request.param))
    return fs, f"{root}/stage/lock.json"


def test_two_builders_take_turns(any_place) -> None:
    fs, path = any_place
    happened: Queue[Any] = Queue()

    def work() -> None:
        clock = Clock(sleep=lambda seconds: REAL.sleep(0.01))
        with lock.hold(fs, path, on_wait=happened.put, clock=clock):
            happened.put("inside")

    with lock.hold(fs, path):
        other = threading.Thread(target=work)
        other.start()
        owner = happened.get(timeout=60)
        assert owner != "inside" and owner["pid"] == os.getpid()
        happened.put("released")
    assert [happened.get(timeout=60) for _ in range(2)] == ["released", "inside"]
    other.join()
    assert lock.read_owner(fs, path) is None


class Hand:
    """A clock that only sleeping by it moves; `slept` is told the time after each."""

    def __init__(self, slept: Callable[[float], None] = lambda now: None) -> None:
        self.time, self._slept = 0.0, slept
        self.clock = Clock(lambda: self.time, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.time += seconds
        assert self.time < 1000.0, "it waits for ever"
        self._slept(self.time)


def own_elsewhere(place, **more: Any) -> None:
    """Have a process of another host hold the lock."""
    put(place, json.dumps({"token": "t", "host": "elsewhere", "pid": 1, **more}).encode())


def put(place, data: bytes) -> None:
    """Have somebody write the lock."""
    fs, path = place
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    while cas.swap(fs, path, cas.read(fs, path), data) is None:
        continue  # a heartbeat came between


def test_an_owner_is_alive_as_long_as_it_sends_heartbeats(place) -> None:
    """It may have been taken for dead by others, such as a server that was away."""
    assert not lock.is_alive(*place)
    own_elsewhere(place)
    beating = Hand(lambda now: own_elsewhere(place, beat=now) if now > 5 else None)
    assert lock.is_alive(*place, clock=beating.clock) and beating.time < 7
    silent = Hand()
    assert not lock.is_alive(*place, clock=silent.clock) and silent.time > lock.EXPIRY_SECONDS
    freed = Hand(lambda now: put(place, b"null"))
    assert not lock.is_alive(*place, clock=freed.clock)


def test_the_lock_of_a_killed_process_is_taken_over_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "lock.json")
    code = (
        "import sys; from fsspec.core import url_to_fs; from artifacts import lock\n"
        f"fs, p = url_to_fs({path!r})\n"
        "with lock.hold(fs, p):\n print('held', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    child.kill()
    child.communicate()
    fs, p = url_to_fs(path)
    assert lock.read_owner(fs, p)
    hand = Hand()
    with lock.hold(fs, p, clock=hand.clock):
        assert hand.time == 0.0


def test_a_remote_lock_without_a_heartbeat_expires(place) -> None:
    own_elsewhere(place)
    hand = Hand()
    with lock.hold(*place, expiry=30.0, clock=hand.clock):
        assert 30.0 < hand.time < 31.0


def test_a_remote_lock_with_a_heartbeat_does_not_expire(place) -> None:
    own_elsewhere(place, beat=0)

    def beat(now: float) -> None:
        if now <= 100.0 and now % 20.0 == 0.0:
            own_elsewhere(place, beat=now)

    hand = Hand(beat)
    with lock.hold(*place, expiry=30.0, clock=hand.clock):
        assert 130.0 < hand.time < 131.0


@pytest.mark.parametrize("dead", [True, False], ids=["dead", "expired"])
def test_one_of_two_takeovers_acquires_the_lock(
    any_place, dead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both see the same owner before either takes over."""
    both, tries, away = threading.Barrier(2), count(), threading.Event()

    def late(*given: Any) -> VersionedContent | None:
        if next(tries) < 2:
            both.wait(timeout=60)
        return cas.swap(*given)

    owner = {"token": "t", **lock._this_process(), "started": "long ago"}
    put(any_place, json.dumps(owner if dead else {**owner, "host": "elsewhere"}).encode())
    monkeypatch.setattr(lock, "swap", late)
    order: list[str] = []

    def work() -> None:
        times = iter([0.0, 0.0, 0.0, 31.0])  # the owner is seen, and still there after 31 s

        def sleep(seconds: float) -> None:
            if "in" in order:
                away.set()  # one of them waits for the other
            time.sleep(0.01)

        with lock.hold(*any_place, clock=Clock(lambda: next(times, 31.0), sleep)):
            order.append("in")
            assert away.wait(60)
            order.append("out")

    at_once(work, work)
    assert order == ["in", "out", "in", "out"]


def test_a_heartbeat_continues_after_a_store_error(place, monkeypatch: pytest.MonkeyPatch) -> None:
    fs, path = place
    failures = count()

    def failing(*given: Any) -> VersionedContent | None:
        if 1 <= next(failures) <= 3:
            raise RuntimeError("503 from the store, of no kind of OSError")
        return cas.swap(*given)

    monkeypatch.setattr(lock, "swap", failing)
    with lock.hold(fs, path, heartbeat=0.02) as held:
        wait_until(lambda: (lock.read_owner(fs, path) or {}).get("beat", 0) >= 6)
        held.check()
    assert lock.read_owner(fs, path) is None


def test_a_lost_response_to_a_heartbeat_keeps_the_lock(
    any_place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has written it, and the client was told of an error."""
    turns = count()

    def unheard(*given: Any) -> VersionedContent | None:
        done = cas.swap(*given)
        if next(turns) == 1:
            raise TimeoutError("no answer")
        return done

    monkeypatch.setattr(lock, "swap", unheard)
    with lock.hold(*any_place) as held:
        with pytest.raises(TimeoutError):
            held.renew()
        held.renew()
        held.check()


def test_a_former_owner_notices_the_takeover_and_does_not_release(any_place) -> None:
    with lock.hold(*any_place, heartbeat=0.02) as held:
        held.check()
        own_elsewhere(any_place)
        assert held.lost.wait(60)
        with pytest.raises(lock.LockLost, match="took the lock over"):
            held.check()
    assert (lock.read_owner(*any_place) or {})["host"] == "elsewhere"


def test_a_paused_owner_checks_the_lock_in_the_store(place) -> None:
    hand = Hand()
    with lock.hold(*place, heartbeat=1e6, expiry=30.0, clock=hand.clock) as held:
        hand.time = 14.0
        held.check()
        hand.time = 500.0  # nobody wanted it meanwhile
        held.check()
        assert (lock.read_owner(*place) or {})["beat"] == 1
        own_elsewhere(place)
        hand.time = 514.0  # within half the expiry it cannot have been lost
        held.check()
        hand.time = 516.0
        with pytest.raises(lock.LockLost):
            held.check()


def test_a_store_error_at_release_does_not_fail_the_build(
    place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(*given: Any) -> VersionedContent | None:
        raise RuntimeError("503 from the store")

    with lock.hold(*place):
        monkeypatch.setattr(lock, "swap", away)
    assert "503 from the store" in caplog.text


def test_a_process_does_not_wait_for_a_lock_that_it_could_not_release(
    place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry of a stage would otherwise name its own process as the holder, until the expiry."""

    def full(*given: Any) -> VersionedContent | None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, lock.hold(*place) as left:
        patch.setattr(lock, "swap", full)
    assert lock.read_owner(*place) is not None and not lock.is_alive(*place)
    waited: list[Any] = []
    with lock.hold(*place, on_wait=waited.append) as held:
        assert held.claim != left.claim
    assert waited == []


def test_a_process_of_another_pid_namespace_is_not_dead() -> None:
    gone = {**lock._this_process(), "started": "long ago"}
    assert lock.is_dead(gone)
    assert not lock.is_dead({**gone, "pids": "pid:[1]"})
    assert not lock.is_dead({**gone, "host": "elsewhere"})
    assert not lock.is_dead({**gone, "boot": "of a machine with the same name"})
    assert not lock.is_dead(lock._this_process())


def test_a_process_that_proc_hides_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under hidepid, other users' processes have no entry in /proc."""

    def denied(pid: int, number: int) -> None:
        raise PermissionError

    hidden = {**lock._this_process(), "pid": 2**22 + 1, "started": "123"}
    assert lock.is_dead(hidden)
    monkeypatch.setattr(os, "kill", denied)
    assert not lock.is_dead(hidden)


def test_time_passes_while_the_machine_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """time.monotonic stands still meanwhile."""
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    before = REAL.now()
    REAL.sleep(0.01)
    assert REAL.now() > before


def test_an_incomplete_lock_is_waited_for_and_has_no_owner(place) -> None:
    fs, path = place
    put(place, b"")
    waited: list[dict[str, Any]] = []
    hand = Hand()
    with lock.hold(fs, path, on_wait=waited.append, expiry=30.0, clock=hand.clock):
        assert hand.time > 30.0
    assert waited == []


def test_each_owner_that_is_waited_for_is_named(place) -> None:
    """Another owner may have other code than the first: its waiting host must look again."""
    fs, path = place
    owners = [json.dumps({"token": name, "host": name}).encode() for name in ("first", "second")]
    put(place, owners[0])
    waited: list[str] = []

    def on_wait(owner: dict[str, Any]) -> None:
        waited.append(owner["token"])
        put(place, owners[1])  # it takes over

    with lock.hold(fs, path, on_wait=on_wait, expiry=30.0, clock=Hand().clock):
        assert waited == ["first", "second"]
