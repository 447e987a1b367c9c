"""A checkpoint is wholly there or not there, and the newest that verifies is the one used."""

import errno
import logging
import os
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import chips
import fsspec
import numpy as np
import pytest
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from gcs_server import GcsServer
from gcsfs.retry import HttpError, validate_response
from kiln_command import ROOT
from safetensors.numpy import load_file
from store_servers import REMOTE, UrlOf
from training import newest

from artifacts.compare_and_swap import read
from artifacts.errors import WAITS
from artifacts.filesystems import subfolders
from artifacts.lock import LockLost, hold, seize
from configs.errors import Away, Refused
from runtimes.contract import State
from runtimes.registry import interpreter
from runtimes.train.checkpoints import CheckpointError, Checkpoints

FACTS = {"seed": 1, "train": {}}


def state(value: float, size: int = 1000) -> State:
    arrays = {"b.weight": np.full((2, size), value, np.float32), "a.bias": np.ones(3, np.float32)}
    return {"weights": arrays, "exp_avg": arrays, "exp_avg_sq": arrays, "ema": arrays}


def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, state(step), [f'{{"step": {n + 1}}}' for n in range(step)], FACTS)


def away(*_: object, **__: object) -> None:
    raise HttpError({"code": 503, "message": "Service Unavailable"})


@pytest.mark.parametrize("kind", REMOTE)
def test_a_run_deletes_checkpoints_of_its_own_folder_only(kind: str, url_of: UrlOf) -> None:
    """As a pattern, `[b]` matches `b`."""
    url = url_of(kind)
    beside, own = Checkpoints(f"{url}/b", keep=2), Checkpoints(f"{url}/[b]", keep=1)
    save(beside, 1, 2)
    save(own, 1, 2)
    assert beside.read(1, verify=True).step == 1
    fs, root = url_to_fs(f"{url}/[b]/checkpoints")
    assert subfolders(fs, root) == ["step-00000002"]


@pytest.mark.parametrize("kind", ["local", "memory", *REMOTE])
def test_what_is_saved_is_read_back(kind: str, url_of: UrlOf) -> None:
    url = url_of(kind)
    save(Checkpoints(url, keep=2), 3)
    latest = Checkpoints(url, keep=2).latest()
    assert latest is not None and latest.step == 3
    assert latest.history[2] == '{"step": 3}' and latest.facts["seed"] == 1
    np.testing.assert_equal(latest.state, state(3))


@pytest.mark.slow
def test_the_newest_is_not_skipped_because_the_store_does_not_give_it(
    gcs: GcsServer, url_of: UrlOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(url_of("gs"), keep=2)
    save(checkpoints, 1, 2)
    for what in ("manifest.json", "weights.safetensors", "history.jsonl"):
        with monkeypatch.context() as patch:
            patch.setattr(gcs, "forbidden", rf"^GET .*/step-00000002/{what}$")
            with pytest.raises(OSError, match="Forbidden"):
                checkpoints.latest()
    assert newest(checkpoints) == 2


def bad_request(*_: object, **__: object) -> None:
    """gcsfs has an error of Python's for this status."""
    validate_response(400, b'{"error": {"message": "invalid argument"}}', "bucket/checkpoints")


@pytest.mark.parametrize("call", ["ls", "cat_file"])
@pytest.mark.parametrize("failures", [2, 4])
def test_the_best_checkpoint_is_read_after_a_short_outage(
    url_of: UrlOf, monkeypatch: pytest.MonkeyPatch, call: str, failures: int
) -> None:
    checkpoints, waited = Checkpoints(url_of("memory"), keep=2), list[float]()
    save(checkpoints, 1, 2)
    read = getattr(MemoryFileSystem, call)

    def short_outage(*arguments: Any, **more: Any) -> Any:
        return (away if len(waited) < failures else read)(*arguments, **more)

    monkeypatch.setattr(MemoryFileSystem, call, short_outage)
    monkeypatch.setattr(time, "sleep", waited.append)
    if failures > len(WAITS):
        with pytest.raises(Away):
            checkpoints.first_valid([1, 2])
    else:
        found = checkpoints.first_valid([1, 2])
        assert found is not None and found.step == 1
    assert waited == list(WAITS[:failures])


@pytest.mark.parametrize("call", ["ls", "cat_file", "open"])
@pytest.mark.parametrize(
    ("answer", "reason"), [(away, r"HttpError: .*503"), (bad_request, r"\w+: Bad Request")]
)
def test_checkpoints_of_a_store_that_is_away_are_not_skipped(
    url_of: UrlOf, monkeypatch: pytest.MonkeyPatch, call: str, answer: Any, reason: str
) -> None:
    checkpoints = Checkpoints(url_of("memory"), keep=2)
    save(checkpoints, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, call, answer)
        with pytest.raises(Away, match=f"cannot be read: {reason}"):
            checkpoints.latest()
    assert newest(checkpoints) == 2


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(
    kind: str, url_of: UrlOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3's SlowDown is an OSError too, which `glob` takes for an empty folder."""
    checkpoints = Checkpoints(url_of(kind), keep=2)
    save(checkpoints, 1, 2)

    def busy(*_: object, **__: object) -> None:
        raise OSError(errno.EBUSY, "Slow down")

    with monkeypatch.context() as patch:
        patch.setattr(type(checkpoints._fs), "ls", busy)
        with pytest.raises(CheckpointError, match="cannot be read: Slow down"):
            checkpoints.latest()
        with pytest.raises(OSError, match="Slow down"):
            checkpoints.discard_after(1)
    assert newest(checkpoints) == 2


@pytest.mark.parametrize(
    "error", [PermissionError("Access Denied"), OSError("Forbidden: no"), TypeError("a bug")]
)
def test_a_store_that_denies_access_is_not_away(
    url_of: UrlOf, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A retry needs a person, or a mended program, first."""

    def denied(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", denied)
    with pytest.raises(CheckpointError):
        save(Checkpoints(url_of("memory"), keep=1), 1)


@pytest.mark.parametrize("call", ["open", "pipe_file", "exists"])
def test_a_store_that_is_away_costs_the_checkpoint(
    url_of: UrlOf, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    checkpoints = Checkpoints(url_of("memory"), keep=1)
    save(checkpoints, 1)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, call, away)
        said = r"could not be written: HttpError: .*503"
        with pytest.raises(Away, match=said):
            save(checkpoints, 2)
    assert newest(checkpoints) == 1
    save(checkpoints, 3)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "rm", away)
        save(checkpoints, 4)  # old ones are kept
    assert newest(checkpoints) == 4


SAVE = """
import sys
import numpy as np
from runtimes.train.checkpoints import Checkpoints

arrays = {"a": np.arange(6, dtype=np.float32)}
for url in sys.argv[1:]:
    Checkpoints(url, keep=2).save(3, {"weights": arrays}, ["{}"], {})
    latest = Checkpoints(url, keep=2).latest()
    assert latest is not None and latest.step == 3
"""


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["xla", "mindspore"])
def test_a_runtime_with_an_environment_of_its_own_keeps_checkpoints_in_buckets(
    runtime: str, url_of: UrlOf
) -> None:
    if reason := chips.not_selected(runtime) or without_environment(runtime):
        pytest.skip(reason)
    urls = [url_of("s3"), url_of("gs")]
    done = subprocess.run(
        [interpreter(runtime), "-c", SAVE, *urls], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for url in urls:
        latest = Checkpoints(url, keep=2).latest()
        assert latest is not None
        np.testing.assert_equal(latest.state, {"weights": {"a": np.arange(6, dtype=np.float32)}})


def without_environment(runtime: str) -> str:
    try:
        interpreter(runtime)
    except Refused as error:
        return chips.unless_required(runtime, str(error))
    return ""


def test_all_is_synced_before_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power failure the disk has what was synced, names in folders too."""
    contents, names, fsync, replace = set[str](), set[str](), os.fsync, os.replace
    link, work = os.link, tmp_path / "new/work"

    def watched(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        contents.add(str(path))
        names.update(map(str, path.iterdir()) if path.is_dir() else ())
        fsync(descriptor)

    def replacing(beside: str, path: str) -> None:
        if path.endswith("/manifest.json"):
            committing(Path(path))
        replace(beside, path)
        contents.update({path} if beside in contents else ())

    def linking(beside: str, path: str) -> None:
        link(beside, path)
        contents.update({path} if beside in contents else ())

    def committing(manifest: Path) -> None:
        files = [path for path in manifest.parent.iterdir() if path.suffix != ".tmp"]
        assert len(files) == 6
        assert {str(path) for path in files} <= contents & names
        above = [path for path in manifest.parents if tmp_path in path.parents]
        assert {str(path) for path in above} <= names

    monkeypatch.setattr(os, "fsync", watched)
    monkeypatch.setattr(os, "replace", replacing)
    monkeypatch.setattr(os, "link", linking)
    save(Checkpoints(str(work), keep=2), 3)
    assert (work / "checkpoints/step-00000003/manifest.json").exists()


def test_safetensors_itself_reads_the_weights(tmp_path: Path) -> None:
    save(Checkpoints(str(tmp_path), keep=2), 3)
    path = tmp_path / "checkpoints/step-00000003/weights.safetensors"
    np.testing.assert_equal(load_file(path), state(3)["weights"])


def test_a_new_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert Checkpoints(str(tmp_path), keep=2).latest() is None


@pytest.mark.parametrize("kind", ["local", *REMOTE])
def test_the_newest_are_kept(kind: str, url_of: UrlOf) -> None:
    fs, root = fsspec.core.url_to_fs(url_of(kind))
    save(Checkpoints(fs.unstrip_protocol(root), keep=2), 1, 2, 3, 12)
    kept = sorted({path.split("/")[-2] for path in fs.find(f"{root}/checkpoints")})
    assert kept == ["step-00000003", "step-00000012"]


@pytest.mark.parametrize("name", ["weights", "exp_avg", "ema", "history", "state", "manifest"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_broken_one_is_skipped(
    tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(str(tmp_path), keep=3)
    save(checkpoints, 1, 2)
    (path,) = (tmp_path / "checkpoints/step-00000002").glob(f"{name}.*")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flip" else data[: len(data) // 2])
    with caplog.at_level(logging.WARNING, "kiln"):
        assert newest(checkpoints) == 1
    # without its manifest it was never committed: there is nothing to warn of
    assert (damage, name) == ("gone", "manifest") or "step-00000002 is skipped" in caplog.text


def test_facts_nested_too_deeply_for_python_are_damage(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path), keep=3)
    save(checkpoints, 1)
    (tmp_path / "checkpoints/step-00000001/state.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        checkpoints.read(1)


@pytest.mark.parametrize("name", ["weights", "history", "manifest"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOTCONN, errno.EACCES])
def test_an_error_that_tells_nothing_of_a_file_is_no_damage(
    tmp_path: Path, name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else too many open files, or a disk of the network, would begin the run again."""
    checkpoints = Checkpoints(str(tmp_path), keep=3)
    save(checkpoints, 1, 2)
    opening = LocalFileSystem._open

    def refused(fs: LocalFileSystem, path: str, *given: Any, **options: Any) -> Any:
        if name in path:
            raise OSError(number, os.strerror(number), path)
        return opening(fs, path, *given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(LocalFileSystem, "_open", refused)
        with pytest.raises(CheckpointError, match=os.strerror(number)):
            checkpoints.latest()
    assert newest(checkpoints) == 2


@pytest.mark.parametrize("kind", ["local", *REMOTE])
def test_a_half_written_one_is_written_anew(kind: str, url_of: UrlOf) -> None:
    fs, root = fsspec.core.url_to_fs(url_of(kind))
    checkpoints = Checkpoints(fs.unstrip_protocol(root), keep=2)
    save(checkpoints, 1)
    fs.makedirs(f"{root}/checkpoints/step-00000002", exist_ok=True)
    fs.pipe_file(f"{root}/checkpoints/step-00000002/weights.safetensors", b"killed while writing")
    assert newest(checkpoints) == 1
    save(checkpoints, 2)
    assert newest(checkpoints) == 2


def test_what_was_left_half_written_long_ago_is_deleted(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path), keep=2)
    for step in (2, 9):
        left = tmp_path / f"checkpoints/step-0000000{step}/weights.safetensors"
        left.parent.mkdir(parents=True)
        left.write_bytes(b"killed while writing")
    save(checkpoints, 1, 3)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000001", "step-00000003", "step-00000009"]


def steps_kept(tmp_path: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (tmp_path / "checkpoints").iterdir())


def test_the_best_are_kept_beside_the_newest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path), keep=1, best=2)
    order = [99, 2, 5, 4, 1, 6]  # step 99 has no checkpoint
    for step in range(1, 8):
        best_first = [n for n in order if n <= step or n == 99]
        checkpoints.save(step, state(step), [], FACTS, best_first=best_first)
    assert steps_kept(tmp_path) == [2, 5, 7]
    (tmp_path / "checkpoints/step-00000002/manifest.json").write_text("damaged")
    checkpoints.save(8, state(8), [], FACTS, best_first=[2, 5, 7])
    assert steps_kept(tmp_path) == [5, 7, 8]


def test_what_may_be_needed_is_not_pruned(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path), keep=1)
    save(checkpoints, 1)
    checkpoints.save(2, state(2), [], FACTS, prune=False)
    assert steps_kept(tmp_path) == [1, 2]
    before = checkpoints.latest(before=2)
    assert before is not None and before.step == 1
    checkpoints.discard_after(1)
    assert steps_kept(tmp_path) == [1]


def test_large_groups_are_split_and_read_back_the_same(tmp_path: Path) -> None:
    arrays = {f"unet.{n}.weight": np.full((n, 5), n, np.float32) for n in range(1, 8)}
    whole = {"weights": arrays, "ema": arrays, "constants": {}}
    checkpoints = Checkpoints(str(tmp_path), keep=1, shard_bytes=130)
    checkpoints.save(1, whole, [], FACTS)
    folder = tmp_path / "checkpoints/step-00000001"
    files = sorted(folder.glob("weights*"))
    assert [path.name for path in files] == [
        f"weights-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    parts = [load_file(path) for path in files]
    assert len(parts) == 5 and sum(map(len, parts)) == 7
    sizes = [sum(array.nbytes for array in part.values()) for part in parts]
    assert all(size <= 130 or len(part) == 1 for size, part in zip(sizes, parts, strict=True))
    latest = checkpoints.latest()
    assert latest is not None
    np.testing.assert_equal(latest.state, whole)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The kernel refuses to write more, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_keeps_the_last_good_one_and_says_so(tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path), keep=1)
    save(checkpoints, 1)
    with (
        largest_file(50_000),
        pytest.raises(
            CheckpointError,
            match=r"step-00000002 could not be written: .*; .* good one is of step 1",
        ) as caught,
    ):
        checkpoints.save(2, state(2, size=100_000), [], FACTS)
    assert caught.value.errno == errno.EFBIG and "Errno" not in str(caught.value)
    assert newest(checkpoints) == 1
    assert not (tmp_path / "checkpoints/step-00000002").exists(), "it should make room again"


def test_checkpoints_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(Checkpoints(str(tmp_path / name), keep=1), 5)
    fs = fsspec.filesystem("file")
    one, other = (fs.find(str(tmp_path / name)) for name in ("a", "b"))
    assert [fs.cat_file(path) for path in one] == [fs.cat_file(path) for path in other]


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_builder_that_lost_its_lock_changes_no_checkpoint(kind: str, url_of: UrlOf) -> None:
    """Its process may be writing when another builder continues in the same folder."""
    url = url_of(kind)
    fs, root = url_to_fs(url)
    path = f"{root}/lock.json"
    with hold(fs, path) as paused:
        late = Checkpoints(url, keep=1, check=lambda: paused.claim.check(fs))
        save(late, 1)
        with seize(fs, path, read(fs, path)) as other:
            assert other is not None
            owners = Checkpoints(url, keep=3, check=lambda: other.claim.check(fs))
            save(owners, 2, 3)
            before = {name: fs.cat_file(name) for name in fs.find(f"{root}/checkpoints")}
            for step in (3, 4):  # step 3 is there already; 4 would delete those before it
                with pytest.raises(LockLost):
                    late.save(step, state(9), [], FACTS)
            with pytest.raises(LockLost):
                late.discard_after(0)
    assert {name: fs.cat_file(name) for name in fs.find(f"{root}/checkpoints")} == before
