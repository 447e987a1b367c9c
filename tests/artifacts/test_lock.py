"""One builder per key, and a dead builder's lock does not hold anybody up."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from uuid import uuid4

import pytest
from fsspec.core import url_to_fs

from artifacts import lock


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path):
    url = str(tmp_path) if request.param == "local" else f"memory://{uuid4()}"
    fs, root = url_to_fs(url)
    return fs, f"{root}/stage/lock.json"


def test_two_builders_take_turns(place) -> None:
    fs, path = place
    inside, most, waited = [0], [0], []

    def work() -> None:
        with lock.hold(fs, path, waiting=waited.append):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.1)
            inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1
    assert waited
    assert waited[0]["pid"] == os.getpid()
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
