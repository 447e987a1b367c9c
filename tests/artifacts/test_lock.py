"""One builder per key, and a dead builder's lock does not hold anybody up."""

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
from fsspec.implementations.local import LocalFileSystem
from stores import REMOTE, UrlOf

from artifacts import lock
from artifacts.clock import Clock


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
        with lock.hold(fs, path, waiting=happened.put):
            happened.put("inside")

    with lock.hold(fs, path):
        other = threading.Thread(target=work)
        other.start()
        owner = happened.get(timeout=60)
        assert owner != "inside" and owner["pid"] == os.getpid()
        happened.put("released")
    assert [happened.get(timeout=60) for _ in range(2)] == ["released", "inside"]
    other.join()
    assert not fs.exists(path)


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
    fs, path = place
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    owner = {"token": "t", "host": "elsewhere", "pid": 1, **more}
    fs.pipe_file(path, json.dumps(owner).encode())


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
    assert fs.exists(p)
    hand = Hand()
    with lock.hold(fs, p, clock=hand.clock):
        assert hand.time == lock.SETTLE_SECONDS


def test_a_lock_elsewhere_expires_when_its_heartbeat_stops(place) -> None:
    own_elsewhere(place)
    hand = Hand()
    with lock.hold(*place, expiry=30.0, clock=hand.clock):
        assert 30.0 < hand.time < 31.0


def test_a_beating_lock_elsewhere_does_not_expire(place) -> None:
    own_elsewhere(place, beat=0)

    def beat(now: float) -> None:
        if now <= 100.0 and now % 20.0 == 0.0:
            own_elsewhere(place, beat=now)

    hand = Hand(beat)
    with lock.hold(*place, expiry=30.0, clock=hand.clock):
        assert 130.0 < hand.time < 131.0


def test_of_two_who_take_over_one_dead_lock_one_holds_it(tmp_path: Path) -> None:
    """Both see the dead owner; the second removes what the first has put in its place."""
    both, turns = threading.Barrier(2), count()
    made, removed, away = threading.Event(), threading.Event(), threading.Event()

    class Late(LocalFileSystem):
        def rm_file(self, path: str) -> None:
            turn = next(turns)
            if turn < 2:
                both.wait(timeout=60)
            if turn == 1:
                assert made.wait(60)
            super().rm_file(path)
            if turn == 1:
                removed.set()

    def sleep(seconds: float) -> None:
        if seconds == lock.SETTLE_SECONDS:
            made.set()
            assert removed.wait(60)
        elif seconds:
            away.set()  # one of them waits for the other
        time.sleep(0.001)

    fs, path = Late(skip_instance_cache=True), str(tmp_path / "lock.json")
    dead = {"token": "t", **lock._this_process(), "started": "long ago"}
    fs.pipe_file(path, json.dumps(dead).encode())
    order: list[str] = []

    def work() -> None:
        with lock.hold(fs, path, clock=Clock(lambda: 0.0, sleep)):
            order.append("in")
            assert away.wait(60)
            order.append("out")

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert next(turns) >= 4
    assert order == ["in", "out", "in", "out"]


def test_a_heartbeat_outlives_a_store_that_fails(tmp_path: Path) -> None:
    class Failing(LocalFileSystem):
        failures = count()

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
            if mode == "overwrite" and next(self.failures) < 2:
                raise RuntimeError("503 from the store, of no kind of OSError")
            super().pipe_file(path, value, mode=mode, **more)

    fs, path = Failing(skip_instance_cache=True), str(tmp_path / "lock.json")
    with lock.hold(fs, path, heartbeat=0.02):
        until = time.monotonic() + 60
        while (lock.read_owner(fs, path) or {}).get("beat", 0) < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert not fs.exists(path)


def test_a_process_of_another_pid_namespace_is_not_known_dead() -> None:
    gone = {**lock._this_process(), "started": "long ago"}
    assert lock.is_dead(gone)
    assert not lock.is_dead({**gone, "pids": "pid:[1]"})
    assert not lock.is_dead({**gone, "host": "elsewhere"})
    assert not lock.is_dead(lock._this_process())


def test_a_lock_half_written_is_waited_for_and_names_nobody(place) -> None:
    fs, path = place
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    fs.pipe_file(path, b"")
    waited: list[dict[str, Any]] = []
    hand = Hand()
    with lock.hold(fs, path, waiting=waited.append, expiry=30.0, clock=hand.clock):
        assert hand.time > 30.0
    assert waited == []
