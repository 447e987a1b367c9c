"""Builders of the same artifacts, killed and paused past their locks' expiry: each commits once."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_servers import UrlOf

from artifacts.compare_and_swap import create, read
from artifacts.filesystems import Clock
from artifacts.lock import LockLost, hold, seize
from artifacts.store import KeyParts, Store

BUILDER = """
import sys, time, uuid
from artifacts.lock import LockLost, hold
from artifacts.store import KeyParts
from artifacts.store import Store
store, keys = Store(sys.argv[1]), int(sys.argv[2])
for n in range(keys):
    parts = KeyParts("train", 1, {"n": n}, {})
    while store.find("train", parts.key) is None:
        path = f"{store.root}/train/{parts.key}/lock.json"
        try:
            with hold(store.fs, path, expiry=1.0, heartbeat=0.1) as lock:
                if store.find("train", parts.key) is not None:
                    break
                draft, mine = store.draft(parts, lock), uuid.uuid4().hex
                for part in range(3):
                    draft.write(f"{part}", mine.encode())
                    time.sleep(0.05)
                draft.commit({"by": mine}, {})
                print(n, mine, flush=True)
        except LockLost:
            print("lost", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "keys", "builders"),
    [
        ("local", 6, 3),
        *(pytest.param(kind, 60, 4, marks=pytest.mark.soak) for kind in ("local", "s3", "gs")),
    ],
)
def test_killed_and_paused_builders_commit_each_artifact_once(
    kind: str, keys: int, builders: int, url_of: UrlOf, chance: random.Random
) -> None:
    url = url_of(kind)
    said: list[str] = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", BUILDER, url, str(keys)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    running = [start() for _ in range(builders)]
    until = time.monotonic() + 500
    while any(process.poll() is None for process in running):
        assert time.monotonic() < until, "it hangs"
        time.sleep(chance.uniform(0.1, 0.6))
        at = chance.randrange(builders)
        if running[at].poll() is not None:
            continue
        if chance.random() < 0.3:
            running[at].kill()
            said.append(running[at].communicate()[0])
            running[at] = start()
        else:
            running[at].send_signal(signal.SIGSTOP)
            time.sleep(chance.uniform(0.2, 1.8))
            running[at].send_signal(signal.SIGCONT)
    ended = [(process.communicate()[0], process.returncode) for process in running]
    assert [code for _, code in ended] == [0] * builders
    lines = [line.split() for text, _ in ended for line in text.splitlines()]
    lines += [line.split() for text in said for line in text.splitlines()]
    commits = [(int(line[0]), line[1]) for line in lines if line != ["lost"]]
    assert max(Counter(n for n, _ in commits).values()) == 1
    store = Store(url)
    for n in range(keys):
        artifact = store.load("train", KeyParts("train", 1, {"n": n}, {}).key)
        assert artifact is not None
        assert store.fault(artifact, deep=True) is None
        mine = artifact.summary["by"]
        assert all(artifact.read(f"{part}") == mine.encode() for part in range(3))
        assert (n, mine) in commits or n not in dict(commits)


def test_a_file_that_a_paused_builder_writes_late_replaces_no_committed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pauses after its last check of the lock; meanwhile another builder commits."""
    store, jump = Store(str(tmp_path)), [0.0]
    parts = KeyParts("train", 1, {}, {})
    path = f"{store.root}/train/{parts.key}/lock.json"
    clock = Clock(now=lambda: time.monotonic() + jump[0])

    def pausing(act: Callable[[str, str], None]) -> Callable[[str, str], None]:
        def paused(source: str, target: str) -> None:
            if target.endswith("/data") and not jump[0]:
                jump[0] = 100.0
                with seize(store.fs, path, read(store.fs, path)) as lock:
                    draft = store.draft(parts, lock)
                    draft.write("data", b"of the other")
                    draft.commit({}, {})
            act(source, target)

        return paused

    with pytest.raises(LockLost), hold(store.fs, path, clock=clock) as lock:
        draft = store.draft(parts, lock)
        for name in ("link", "replace"):
            monkeypatch.setattr(os, name, pausing(getattr(os, name)))
        draft.write("data", b"of the paused one")
    artifact = store.load("train", parts.key)
    assert artifact is not None and artifact.read("data") == b"of the other"


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_manifest_that_a_paused_builder_creates_late_is_no_commit(
    kind: str, url_of: UrlOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pauses after its last check of the lock; another builder has begun, but not committed."""
    store, jump = Store(url_of(kind)), [0.0]
    parts = KeyParts("train", 1, {}, {})
    path = f"{store.root}/train/{parts.key}/lock.json"
    clock = Clock(now=lambda: time.monotonic() + jump[0])

    def late(*given: Any) -> bool:
        jump[0] = 100.0
        with seize(store.fs, path, read(store.fs, path)) as other:
            assert other is not None
        return create(*given)

    monkeypatch.setattr("artifacts.store.create", late)
    with pytest.raises(LockLost), hold(store.fs, path, clock=clock) as lock:
        draft = store.draft(parts, lock)
        draft.write("data", b"of the paused one")
        draft.commit({}, {})
