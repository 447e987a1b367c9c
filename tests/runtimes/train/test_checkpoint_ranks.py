"""Ranks write and read one checkpoint together, each its part, in bounded memory."""

import errno
import os
import subprocess
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from kiln_command import ROOT
from store_servers import REMOTE, RequestsTo, UrlOf
from training import newest

from runtimes import optimizer_state as state_module
from runtimes.contract import Owners, State
from runtimes.optimizer_state import owned_copies, read_state_arrays, shapes_of
from runtimes.process.collectives import free_port
from runtimes.train import checkpoints as train_checkpoints
from runtimes.train.checkpoints import CheckpointError, Checkpoints, array_files, files_by_rank

FACTS = {"seed": 1, "train": {}}
#: Bytes of a file: the state below has 11 files.
MOST = 900


def whole(seed: int) -> State:
    rng = np.random.default_rng(seed)
    arrays = {f"unet.{n}": rng.standard_normal((n, 12), np.float32) for n in range(1, 9)}
    scalar = {"scale": np.array(rng.random(), np.float32)}
    return {"weights": arrays, "ema": {n: a * 2 for n, a in arrays.items()}, "loss_scale": scalar}


class Threads:
    """Writers of one run that are threads of this process."""

    def __init__(self, rank: int, barrier: threading.Barrier, reports: dict[int, bytes]) -> None:
        self.rank, self.world = rank, barrier.parties
        self._barrier, self._reports = barrier, reports

    def gather(self, data: bytes) -> list[bytes]:
        self._reports[self.rank] = data
        self._barrier.wait(20)
        found = [self._reports[rank] for rank in range(self.world)]
        self._barrier.wait(20)
        return found


def by_ranks(url: str, world: int, work: Callable[[Checkpoints], Any]) -> list[Any]:
    """The result or the error of `work` with each rank's checkpoints, at the same time."""
    barrier, reports = threading.Barrier(world), dict[int, bytes]()

    def run(rank: int) -> Any:
        writers = Threads(rank, barrier, reports)
        try:
            return work(Checkpoints(url, 2, shard_bytes=MOST, writers=writers))
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


def save_part(checkpoints: Checkpoints, step: int) -> int:
    """Save the arrays that a rank owns; it does not have the others. Returns their bytes."""
    state = whole(step)
    owners = checkpoints.owners(shapes_of(state))
    own = owned_copies(state, owners, checkpoints._writers.rank, np.array)
    checkpoints.save(step, own, ["{}"], FACTS, shapes=shapes_of(state))
    return sum(array.nbytes for arrays in own.values() for array in arrays.values())


@pytest.mark.parametrize("kind", ["local", "memory", *REMOTE])
def test_each_rank_writes_its_part(kind: str, url_of: UrlOf) -> None:
    url = url_of(kind)
    parts = by_ranks(url, 3, lambda checkpoints: save_part(checkpoints, 3))
    assert min(parts) > 0.25 * sum(parts)
    latest = Checkpoints(url, 2).latest()
    assert latest is not None
    np.testing.assert_equal(latest.state, whole(3))


def test_a_checkpoint_has_the_same_bytes_for_any_number_of_ranks(tmp_path: Path) -> None:
    for world in (1, 2, 5):
        by_ranks(str(tmp_path / str(world)), world, lambda checkpoints: save_part(checkpoints, 3))
    one, two, five = (
        {path.name: path.read_bytes() for path in (tmp_path / world).rglob("*.*")}
        for world in "125"
    )
    assert len(one) == len(array_files(shapes_of(whole(3)), MOST)) + 3
    assert one == two == five


def test_bytes_are_divided_evenly() -> None:
    shapes = {group: {f"unet.{n}": (n % 7 + 1, 1000) for n in range(300)} for group in "abcd"}
    files = array_files(shapes, 100_000)
    loads = [sum(file.size for file in own) for own in files_by_rank(files, 8)]
    assert sum(loads) == sum(file.size for file in files) and max(loads) < 1.05 * sum(loads) / 8


def test_a_rank_with_a_full_disk_costs_the_checkpoint_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path)
    by_ranks(url, 2, lambda checkpoints: save_part(checkpoints, 1))
    write = Checkpoints._write_part

    def full(self: Checkpoints, *arguments: Any) -> Any:
        if self._writers.rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_write_part", full)
        for error in by_ranks(url, 2, lambda checkpoints: save_part(checkpoints, 2)):
            assert error.errno == errno.ENOSPC
            assert "step-00000002 could not be written: No space left" in str(error)
    assert not (tmp_path / "checkpoints/step-00000002").exists()
    assert newest(Checkpoints(url, 2)) == 1


def test_machines_without_a_shared_folder_commit_no_checkpoint(tmp_path: Path) -> None:
    barrier, reports = threading.Barrier(2), dict[int, bytes]()

    def run(rank: int) -> Any:
        writers = Threads(rank, barrier, reports)
        checkpoints = Checkpoints(str(tmp_path / str(rank)), 2, shard_bytes=MOST, writers=writers)
        try:
            return save_part(checkpoints, 1)
        except CheckpointError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert "is on another machine: use a shared store" in first and second > 0
    assert Checkpoints(str(tmp_path / "0"), 2).latest() is None


def test_ranks_agree_to_skip_what_one_of_them_finds_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each verifies only some files, so that one alone cannot decide."""
    url = str(tmp_path)
    for step in (1, 2):
        by_ranks(url, 2, lambda checkpoints, step=step: save_part(checkpoints, step))
    damaged = tmp_path / "checkpoints/step-00000002/weights-00002-of-00003.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    verified: list[str] = []
    fault = train_checkpoints.records.file_fault

    def recorded(fs: Any, path: str, entry: Any) -> Any:
        verified.append(f"{path[-1]} {entry.path}")
        return fault(fs, path, entry)

    monkeypatch.setattr(train_checkpoints.records, "file_fault", recorded)
    found = by_ranks(url, 2, lambda checkpoints: checkpoints.latest())
    assert [saved.step for saved in found] == [1, 1]
    assert len(verified) == len(set(verified)), "a file is verified by one rank"
    files = len(list((tmp_path / "checkpoints/step-00000001").iterdir())) - 1
    assert sum(one[0] == "1" for one in verified) == files


KILLED = """
import os, sys
import numpy as np
from runtimes.process.collectives import HostCollectives, join
from runtimes.process.launcher import Ranks
from runtimes.train import checkpoints as module
from runtimes.train.checkpoints import CheckpointError
from runtimes.train.checkpoints import Checkpoints
from runtimes.optimizer_state import owned_copies, shapes_of

join(Ranks.here())
writers = HostCollectives(2).writers()
checkpoints = Checkpoints(sys.argv[1], 2, shard_bytes=100, writers=writers)
state = {"weights": {str(n): np.full(25, n, np.float32) for n in range(8)}}
shapes = shapes_of(state)
own = owned_copies(state, checkpoints.owners(shapes), writers.rank, np.array)
write, left = module.write_arrays, [2]

def killed(sink, arrays):
    left[0] -= 1
    if left[0] < 0 and writers.rank == 1:
        os._exit(9)
    write(sink, arrays)

checkpoints.save(1, own, ["{}"], {}, shapes=shapes)
module.THREADS, module.write_arrays = 1, killed
try:
    checkpoints.save(2, own, ["{}"], {}, shapes=shapes)
except CheckpointError as error:
    assert "the last good one is of step 1" in str(error)
    sys.exit(3)
"""


@pytest.mark.slow
def test_a_rank_killed_between_its_files_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, **meeting, "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        assert [rank.wait(120) for rank in ranks] == [3, 9]
    finally:
        for rank in ranks:
            rank.kill()
    latest = Checkpoints(str(tmp_path), 2).latest()
    assert latest is not None and latest.step == 1
    assert latest.state["weights"]["7"][...].tolist() == [7.0] * 25


def test_a_resume_from_a_bucket_fetches_the_needed_rows_alone(
    url_of: UrlOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, arrays = url_of("memory"), {"a": np.arange(4000, dtype=np.float32).reshape(1000, 4)}
    Checkpoints(url, 2).save(3, {"weights": arrays, "exp_avg": arrays}, ["{}"], FACTS)
    saved, fetched = Checkpoints(url, 2).read(3), list[int]()
    fetch = MemoryFileSystem.cat_file

    def counted(self: Any, path: str, start: int, end: int) -> bytes:
        found = fetch(self, path, start, end)
        fetched.append(len(found))
        return bytes(found)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)
    monkeypatch.setattr(MemoryFileSystem, "open", lambda *_, **__: pytest.fail("a file is read"))
    shapes = {"weights": {"a": (1000, 4)}}
    rows = list(read_state_arrays(saved.state, shapes, lambda name, shape: slice(250, 500)))
    assert fetched == [250 * 16]
    np.testing.assert_equal(rows, [("weights", "a", arrays["a"][250:500])])


@pytest.mark.parametrize("kind", REMOTE)
def test_a_bucket_s_checksum_is_compared_rather_than_all_bytes(
    kind: str, url_of: UrlOf, requests_to: RequestsTo
) -> None:
    url = url_of(kind)
    checkpoints = Checkpoints(url, 3)
    for step in (1, 2):
        checkpoints.save(step, whole(step), ["{}"], FACTS)
    requests = requests_to(kind)
    before = len(requests)
    saved = checkpoints.latest()
    assert saved is not None and saved.step == 2
    got = [path for method, path in requests[before:] if method == "GET"]
    got = [path for path in got if not path.startswith("/storage/")]  # metadata of gs
    assert sum(path.endswith("weights.safetensors") for path in got) == 1, "its header"
    fs, path = saved.state["ema"]["unet.8"].fs, saved.state["ema"]["unet.8"].path
    data = bytearray(fs.cat_file(path))
    data[-1] ^= 1
    fs.pipe_file(path, bytes(data))
    saved = checkpoints.latest()
    assert saved is not None and saved.step == 1
    np.testing.assert_equal(saved.state, whole(1))


class Counted:
    """Arrays of 1 MB that are made when they are read, and how many of them exist at most."""

    shape = (2**18,)
    existing = 0
    most = 0
    lock = threading.Lock()

    def __getitem__(self, index: Any) -> Any:
        array = np.empty(self.shape, np.float32)
        with Counted.lock:
            Counted.existing += 1
            Counted.most = max(Counted.most, Counted.existing)
        weakref.finalize(array, self._freed)
        return array

    @staticmethod
    def _freed() -> None:
        with Counted.lock:
            Counted.existing -= 1


def test_a_restore_reads_a_bounded_number_of_bytes_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "AHEAD", 4 * 2**20)
    state = {"weights": {str(n): Counted() for n in range(50)}}
    names = [name for _, name, _ in read_state_arrays(state, shapes_of(state))]
    assert names == list(state["weights"])
    assert Counted.existing <= 1 and 1 < Counted.most <= 4 + 2, "one yielded, one in the caller"


def test_a_copy_of_the_state_has_one_array_more_than_the_rank_owns() -> None:
    groups = {"weights": {str(n): Counted() for n in range(50)}}
    owners: Owners = {"weights": {str(n): n % 10 for n in range(50)}}
    Counted.existing = Counted.most = 0
    own = owned_copies(groups, owners, 3, np.array, gather=lambda name, sharded: sharded[...])
    assert list(own["weights"]) == ["3", "13", "23", "33", "43"]
    assert Counted.most == 1, "gathered arrays at the same time; the copies are not among them"


def test_neither_a_save_nor_a_restore_copies_the_state(tmp_path: Path) -> None:
    arrays = {str(n): np.ones(2**20, np.float32) for n in range(16)}  # 64 MiB
    checkpoints = Checkpoints(str(tmp_path), 2, shard_bytes=2**23)
    tracemalloc.start()
    try:
        checkpoints.save(1, {"weights": arrays}, ["{}"], FACTS)
        saving = tracemalloc.get_traced_memory()[1]
        saved = checkpoints.latest()
        resuming = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert saved is not None
    assert saving < 2**22 and resuming < 2**24, "bytes beside the state"
