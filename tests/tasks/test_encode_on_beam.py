"""The encode pipeline without encoders: lost processes, released ones, other hosts' shards."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
from apache_beam.utils.shared import Shared
from encoder_inputs import SQUARE

from artifacts.records import digest_bytes
from artifacts.store import Shard, Store
from configs.errors import Away
from runtimes.process.job import EncodeJob
from tasks.child_process import ProcessLost
from tasks.encode import encode_on_beam
from tasks.encode.encode_on_beam import EncodeShard, EncodeTask, _Placeholder, encode_shards
from tasks.encode.encoder_processes import EncoderPool, EncodingPlan

pytestmark = pytest.mark.slow

PLAN = EncodingPlan(EncodeJob("torch", "model", batch_size=4, device="cpu"), SQUARE)
FACTS = {"bad_reasons": {}}
TASKS = [EncodeTask(digest_bytes(b"%d" % n), f"{n}.tar", f"{n}", 10**n) for n in range(3)]
TOTAL = 111


class Process:
    """An encoder process that has ended, or not."""

    slots: list[Any]

    def __init__(self, *, ended: bool) -> None:
        self.slots = [self._lost if ended else self._encode] * 2

    def _lost(self, *_: str) -> dict[str, Any]:
        raise ProcessLost("ended with -9")

    def _encode(self, *_: str) -> dict[str, Any]:
        return FACTS

    def wait(self) -> None: ...


def pool(*ended: bool) -> EncoderPool:
    each: Iterator[bool] = iter(ended)
    return EncoderPool(PLAN, len(ended), lambda _: Process(ended=next(each)))  # type: ignore


def test_no_shard_goes_to_a_process_that_has_ended() -> None:
    found, lost = pool(True, False), 0
    for _ in range(10):
        try:
            found.encode("", "", "")
        except ProcessLost:
            lost += 1
    assert lost == 2  # one for each shard that it worked on


def test_without_a_process_every_shard_fails() -> None:
    found = pool(True, True)
    for _ in range(10):
        with pytest.raises(ProcessLost):
            found.encode("", "", "")


def test_a_worker_releases_the_encoders_of_a_run_before_it_loads_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive, found = WeakSet[Any](), []

    class Pool:
        def __init__(self, *_: Any) -> None:
            found.append(len(alive))
            alive.add(self)

    monkeypatch.setattr(encode_on_beam, "EncoderPool", Pool)
    for _ in range(2):
        EncodeShard("store", "reports", PLAN).open()
    Shared().acquire(_Placeholder)
    assert found == [0, 0]


def commit(store: Store, task: EncodeTask, folder: Path) -> Shard:
    path = folder / "latents"
    path.write_bytes(b"latents")
    return store.commit_shard("encode", task.key, {".safetensors": str(path)}, FACTS)


def test_a_lost_process_fails_the_stage_for_a_retry_and_leaves_no_report(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    commit(store, TASKS[0], tmp_path)  # reported at once
    dofn = EncodeShard(store.url, f"{store.root}/encode/key/progress", PLAN)
    lost = pool(True, True)
    dofn.open(lambda: lost)
    with pytest.raises(ProcessLost, match=r"^ended with -9$") as caught:
        encode_shards(TASKS, store, dofn, {}, lambda *_: None)
    assert isinstance(caught.value, Away)
    assert list(Path(dofn.reports).glob("*")) == []


def test_progress_has_the_shards_of_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three shards one is encoded here at once, one by another host, and one here at the end."""
    store, seen = Store(str(tmp_path / "store")), list[tuple[int, int]]()
    dofn = EncodeShard(store.url, f"{store.root}/encode/key/progress", PLAN)
    both = ExitStack()
    for task in TASKS[1:]:
        both.enter_context(store.shard_lock("encode", task.key))

    class Pool:
        def encode(self, tar: str, sha256: str, path: str) -> dict[str, Any]:
            Path(path).write_bytes(tar.encode())
            Path(path).with_suffix(".npy").write_bytes(b"thumbnails")
            return FACTS

    committed = Store.committed_shards

    def after_the_first_pass(*given: Any) -> Any:
        if store.shard("encode", TASKS[1].key) is None:
            commit(store, TASKS[1], tmp_path)
            both.close()
        return committed(*given)

    monkeypatch.setattr(Store, "committed_shards", after_the_first_pass)
    here = Pool()
    dofn.open(lambda: here)  # type: ignore[arg-type, return-value]
    shards = encode_shards(TASKS, store, dofn, {}, lambda *given: seen.append(given[:2]))
    assert [shard.key for shard in shards] == [task.key for task in TASKS]
    assert (1, TOTAL) in seen  # the end of the first pass
    assert seen[-2:] == [(TOTAL, TOTAL)] * 2  # that of the second, and of the stage
