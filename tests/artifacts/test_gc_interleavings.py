"""A run and a garbage collection at the same moment, in the orders of their steps.

They continue one at a time, each from one step to the next. An order is a word: at `g` the
collection does a step, at `r` the run.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import combinations, cycle, product
from pathlib import Path
from typing import Any

import pytest
from store_servers import UrlOf

from artifacts import compare_and_swap, gc
from artifacts.filesystems import Clock, delete_tree
from artifacts.gc import Collector, mark, record_run, runs
from artifacts.lock import Lock, hold
from artifacts.store import Draft, KeyParts, Store

pytestmark = pytest.mark.slow

PARTS, OTHER = KeyParts("train", 1, {}, {}), KeyParts("train", 2, {}, {})
STEPS: list[tuple[Any, str]] = [
    *((gc, "hold"), (compare_and_swap, "remove")),
    *((gc, name) for name in ("_write", "wait_until_free", "read_record")),
    *((Store, name) for name in ("shard", "load", "commit_shard")),
    *((Collector, "_run_records"), (Draft, "commit"), (Lock, "release")),
]
#: Steps of a collection and of a run that reuses what it finds.
COLLECTION, RUN = 7, 7


class Side(threading.Thread):
    """One of the two; it stops before each step until `advance` is called."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.steps: list[str] = []
        self.error: BaseException | None = None
        self.ended = False
        self._act = act
        self._continue, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.start()

    def run(self) -> None:
        self._continue.acquire()
        try:
            self._act()
        except BaseException as error:
            self.error = error
        self.ended = True
        self._stopped.release()

    def stop(self, step: str) -> None:
        """Wait for the next turn."""
        self.steps.append(step)
        self._stopped.release()
        self._continue.acquire()

    def advance(self) -> None:
        """Continue to the next step, or to the end."""
        if not self.ended:
            self._continue.release()
            assert self._stopped.acquire(timeout=60), self.steps


def stop(step: str) -> None:
    """A step of a side; other threads, such as those of heartbeats, do not stop."""
    if isinstance(side := threading.current_thread(), Side):
        side.stop(step)


def interleave(order: str, collect: Callable[[], None], run: Callable[[], None]) -> None:
    """Do both in an order; they take turns with the steps that it leaves over."""
    sides = {"g": Side(collect), "r": Side(run)}
    for letter in order:
        sides[letter].advance()
    for letter in cycle("gr"):
        if all(side.ended for side in sides.values()):
            break
        sides[letter].advance()
    for side in sides.values():
        if side.error is not None:
            steps = {letter: side.steps for letter, side in sides.items()}
            raise AssertionError(f"order {order}: {steps}") from side.error


def orders() -> Iterator[str]:
    """Every order of the steps of both."""
    for places in combinations(range(COLLECTION + RUN), RUN):
        yield "".join("r" if n in places else "g" for n in range(COLLECTION + RUN))


def orders_of_three_switches() -> Iterator[str]:
    """The collection is interrupted once, and so is the run."""
    for first, then in product(range(COLLECTION + 1), range(1, RUN + 1)):
        for more in range(1, COLLECTION - first + 1):
            yield "g" * first + "r" * then + "g" * more + "r" * RUN


def orders_of_one_pause() -> Iterator[str]:
    """One side stops before one of its steps, and the other does all of its own."""
    for first in range(COLLECTION + 1):
        yield "g" * first + "r" * RUN
    for first in range(1, RUN):
        yield "r" * first + "g" * COLLECTION


@pytest.fixture(autouse=True)
def stepwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function of STEPS stops first; a wait for a lock stops instead of sleeping."""

    def stopping(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def stopped(*given: Any, **more: Any) -> Any:
            stop(name)
            return act(*given, **more)

        return stopped

    for owner, name in STEPS:
        monkeypatch.setattr(owner, name, stopping(name, getattr(owner, name)))
    # Nothing here loses power.
    monkeypatch.setattr("artifacts.filesystems._sync", lambda path: None)
    waiting = Clock(sleep=lambda seconds: stop("wait"))
    monkeypatch.setitem(hold.__wrapped__.__kwdefaults__, "clock", waiting)  # type: ignore[attr-defined]


def reused(store: Store, folder: Path) -> Callable[[], None]:
    """A run that needs a finished artifact, which is garbage; so is its record of 40 days ago."""

    def build() -> None:
        draft = store.draft(PARTS)
        draft.write("data", b"1")
        draft.commit({}, {})

    def run() -> None:
        record_run(store, "a-run", {"stages": {"train": [PARTS.key]}})
        if store.find("train", PARTS.key) is None:
            with store.lock("train", PARTS.key):
                if store.find("train", PARTS.key) is None:
                    build()
        for _ in range(2):  # as the next stages do
            artifact = store.load("train", PARTS.key)
            assert artifact is not None and store.fault(artifact, deep=True) is None

    build()
    if store.is_local:
        record_run(store, "a-run", {"stages": {}})
        at = time.time() - 40 * 86400
        os.utime(f"{store.root}/runs/a-run.json", (at, at))
    return run


def built_from_a_shard(store: Store, folder: Path) -> Callable[[], None]:
    """A run that builds an artifact from a finished shard, which is garbage."""
    (folder / "shard").write_bytes(b"1")

    def commit_shard() -> Any:
        return store.commit_shard("train", "a-shard", {".tar": str(folder / "shard")}, {})

    def run() -> None:
        record_run(store, "a-run", {"stages": {"train": [PARTS.key]}})
        with store.lock("train", PARTS.key) as held:
            draft = store.draft(PARTS, held)
            draft.add_shard(store.shard("train", "a-shard") or commit_shard())
            artifact = draft.commit({}, {})
        for _ in range(2):
            artifact = store.load("train", PARTS.key) or pytest.fail("it was deleted")
            assert store.fault(artifact, deep=True) is None

    commit_shard()
    store.draft(OTHER).commit({}, {})
    record_run(store, "other-run", {"stages": {"train": [OTHER.key]}})
    return run


@pytest.mark.parametrize(
    ("kind", "case", "chosen"),
    [
        ("local", reused, orders_of_three_switches),
        ("local", built_from_a_shard, orders_of_one_pause),
        pytest.param("gs", reused, orders_of_one_pause, marks=pytest.mark.slow),
        *(
            pytest.param(kind, case, chosen, marks=pytest.mark.soak)
            for kind, case, chosen in [
                ("local", reused, orders),
                ("local", built_from_a_shard, orders_of_three_switches),
                ("gs", reused, orders_of_three_switches),
                ("gs", built_from_a_shard, orders_of_one_pause),
                ("s3", reused, orders_of_one_pause),
                ("s3", built_from_a_shard, orders_of_one_pause),
            ]
        ),
    ],
)
def test_a_run_keeps_what_it_finds_during_a_collection(
    kind: str,
    case: Callable[[Store, Path], Callable[[], None]],
    chosen: Callable[[], Iterator[str]],
    url_of: UrlOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, deleted = url_of(kind), set[int]()
    for number, order in enumerate(chosen()):
        store = Store(f"{url}/{number}")
        run = case(store, tmp_path)
        collector = Collector(store, lambda store=store: mark(store, [], 30), days=30, min_age=0)  # type: ignore[misc]
        items = list(collector.garbage())
        assert {item.kind for item in items} >= {
            "shard" if case is built_from_a_shard else "artifact"
        }

        def removing(fs: Any, path: str) -> None:
            stop("rm")
            delete_tree(fs, path)

        def collect(collector: Collector = collector, items: Any = items) -> None:
            deleted.add(len(list(collector.delete(items))))

        with monkeypatch.context() as patch:
            patch.setattr(gc.filesystems, "delete_tree", removing)
            interleave(order, collect, run)
        recorded = {one.path.rpartition("/")[2]: one.keys for one in runs(store)}
        assert recorded["a-run.json"] == {("train", PARTS.key)}, order
    assert deleted >= {0, len(items)}
