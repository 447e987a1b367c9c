"""The pipeline without models: lost processes, released ones, other hosts' shards."""

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
from tasks.devices import commit_shards as pipeline
from tasks.devices.commit_shards import CommitShards, _Placeholder, commit_shards
from tasks.devices.processes import DevicePool
from tasks.devices.shards import ShardTask
from tasks.encode.encoders import EncodingPlan

pytestmark = pytest.mark.slow

PLAN = EncodingPlan(EncodeJob("torch", "model", batch_size=4, device="cpu"), SQUARE)
FACTS = {"bad_reasons": {}}
KEYS = [digest_bytes(b"%d" % n) for n in range(3)]
TASKS = [ShardTask((key,), {"key": key, "tar": ""}, 10**n) for n, key in enumerate(KEYS)]
TOTAL = 111


class Process:
    """A device process that has ended, or not."""

    slots: list[Any]

    def __init__(self, *, ended: bool) -> None:
        self.slots = [self._lost if ended else self._compute] * 2

    def _lost(self, *_: Any) -> dict[str, Any]:
        raise ProcessLost("ended with -9")

    def _compute(self, *_: Any) -> dict[str, Any]:
        return {}

    def wait(self) -> None: ...


def pool(*ended: bool) -> DevicePool:
    each: Iterator[bool] = iter(ended)
    return DevicePool(PLAN, len(ended), lambda _: Process(ended=next(each)))  # type: ignore


def test_no_shard_goes_to_a_process_that_has_ended() -> None:
    found, lost = pool(True, False), 0
    for _ in range(10):
        try:
            found.compute({"tar": ""}, "")
        except ProcessLost:
            lost += 1
    assert lost == 2  # one for each shard that it worked on


def test_without_a_process_every_shard_fails() -> None:
    found = pool(True, True)
    for _ in range(10):
        with pytest.raises(ProcessLost):
            found.compute({"tar": ""}, "")


def test_a_worker_releases_the_encoders_of_a_run_before_it_loads_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive, found = WeakSet[Any](), []

    class Pool:
        def __init__(self, *_: Any) -> None:
            found.append(len(alive))
            alive.add(self)

    monkeypatch.setattr(pipeline, "DevicePool", Pool)
    for _ in range(2):
        CommitShards("store", "reports", PLAN).open()
    Shared().acquire(_Placeholder)
    assert found == [0, 0]


def commit(store: Store, task: ShardTask, folder: Path) -> Shard:
    path = folder / "latents"
    path.write_bytes(b"latents")
    return store.commit_shard("encode", task.key, {".safetensors": str(path)}, FACTS)


def test_a_lost_process_fails_the_stage_for_a_retry_and_leaves_no_report(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    commit(store, TASKS[0], tmp_path)  # reported at once
    dofn = CommitShards(store.url, f"{store.root}/encode/key/progress", PLAN)
    lost = pool(True, True)
    dofn.open(lambda: lost)
    with pytest.raises(ProcessLost, match=r"^ended with -9$") as caught:
        commit_shards(TASKS, store, dofn, {}, lambda *_: None)
    assert isinstance(caught.value, Away)
    assert list(Path(dofn.reports).glob("*")) == []


def test_an_element_is_done_once_all_its_shards_are_committed(tmp_path: Path) -> None:
    """A worker was killed between the two shards of the element."""
    store = Store(str(tmp_path / "store"))
    commit(store, TASKS[0], tmp_path)
    task = ShardTask((KEYS[0], KEYS[1]), {"tar": ""}, 1)

    class Pool:
        def compute(self, request: dict[str, Any], folder: str) -> dict[str, Any]:
            for key in task.keys:
                Path(folder, f"{key}.safetensors").write_bytes(key.encode())
            return dict.fromkeys(task.keys, FACTS)

    dofn = CommitShards(store.url, f"{store.root}/reports", PLAN)
    here = Pool()
    dofn.open(lambda: here)  # type: ignore[arg-type, return-value]
    shards = commit_shards([task], store, dofn, {}, lambda *_: None)
    assert [shard.key for shard in shards] == KEYS[:2]


def test_progress_has_the_shards_of_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three shards one is encoded here at once, one by another host, and one here at the end."""
    store, seen = Store(str(tmp_path / "store")), list[tuple[int, int]]()
    dofn = CommitShards(store.url, f"{store.root}/encode/key/progress", PLAN)
    both = ExitStack()
    for task in TASKS[1:]:
        both.enter_context(store.shard_lock("encode", task.key))

    class Pool:
        def compute(self, request: dict[str, Any], folder: str) -> dict[str, Any]:
            Path(folder, f"{request['key']}.safetensors").write_bytes(b"latents")
            return {request["key"]: FACTS}

    committed = Store.committed_shards

    def after_the_first_pass(*given: Any) -> Any:
        if store.shard("encode", TASKS[1].key) is None:
            commit(store, TASKS[1], tmp_path)
            both.close()
        return committed(*given)

    monkeypatch.setattr(Store, "committed_shards", after_the_first_pass)
    here = Pool()
    dofn.open(lambda: here)  # type: ignore[arg-type, return-value]
    shards = commit_shards(TASKS, store, dofn, {}, lambda *given: seen.append(given[:2]))
    assert [shard.key for shard in shards] == [task.key for task in TASKS]
    assert (1, TOTAL) in seen  # the end of the first pass
    assert seen[-2:] == [(TOTAL, TOTAL)] * 2  # that of the second, and of the stage
