"""One builder per key, and a dead builder's lock does not hold anybody up."""

import json
import os
import subprocess
import sys
import threading
import time
from itertools import count
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from stores import REMOTE, UrlOf

from artifacts import lock


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


def test_the_lock_of_a_killed_process_is_taken_over_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "lock.json")
    code = (
        "import time; from fsspec.core import url_to_fs; from artifacts import lock\n"
        f"fs, p = url_to_fs({path!r})\n"
        "with lock.hold(fs, p):\n print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    child.kill()
    child.wait()
    fs, p = url_to_fs(path)
    assert fs.exists(p)
    started = time.monotonic()
    with lock.hold(fs, p):
        assert time.monotonic() - started < 5


def test_a_lock_elsewhere_expires_when_its_heartbeat_stops(place) -> None:
    fs, path = place
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    fs.pipe_file(path, json.dumps({"token": "t", "host": "elsewhere", "pid": 1}).encode())
    started = time.monotonic()
    with lock.hold(fs, path, expiry=0.4):
        assert time.monotonic() - started >= 0.4


def test_a_beating_lock_elsewhere_does_not_expire(place) -> None:
    fs, path = place
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    stop = threading.Event()

    def elsewhere() -> None:
        for beat in range(12):
            owner = {"token": "t", "host": "elsewhere", "pid": 1, "beat": beat}
            fs.pipe_file(path, json.dumps(owner).encode())
            time.sleep(0.1)
        stop.set()

    other = threading.Thread(target=elsewhere)
    other.start()
    time.sleep(0.05)
    with lock.hold(fs, path, expiry=0.4):
        assert stop.is_set()
    other.join()


def test_of_two_who_take_over_one_dead_lock_one_holds_it(tmp_path: Path) -> None:
    """Both see the dead owner before either removes its lock; one removes late."""

    class Late(LocalFileSystem):
        both, turns = threading.Barrier(2), count()

        def rm_file(self, path: str) -> None:
            turn = next(self.turns)
            if turn < 2:
                self.both.wait(timeout=10)
                time.sleep(0.1 * turn)
            super().rm_file(path)

    fs, path = Late(skip_instance_cache=True), str(tmp_path / "lock.json")
    dead = {"token": "t", **lock._this_process(), "started": "long ago"}
    fs.pipe_file(path, json.dumps(dead).encode())
    inside, most = [0], [0]

    def work() -> None:
        with lock.hold(fs, path):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.4)
            inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert next(Late.turns) >= 4
    assert most[0] == 1


def test_a_heartbeat_outlives_a_store_that_fails(tmp_path: Path) -> None:
    class Failing(LocalFileSystem):
        failures = count()

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
            if mode == "overwrite" and next(self.failures) < 2:
                raise RuntimeError("503 from the store, of no kind of OSError")
            super().pipe_file(path, value, mode=mode, **more)

    fs, path = Failing(skip_instance_cache=True), str(tmp_path / "lock.json")
    with lock.hold(fs, path, heartbeat=0.02):
        until = time.monotonic() + 5
        while (lock.read_owner(fs, path) or {}).get("beat", 0) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        assert time.monotonic() < until
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
    started = time.monotonic()
    with lock.hold(fs, path, waiting=waited.append, expiry=0.4):
        assert time.monotonic() - started >= 0.4
    assert waited == []
