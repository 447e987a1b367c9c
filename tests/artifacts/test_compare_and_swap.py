"""Of several who change one state, one does, on every kind of store."""

import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem
from store_servers import REMOTE, UrlOf
from waiting import at_once

from artifacts import compare_and_swap as cas
from configs.errors import Refused


@pytest.fixture(params=["local", "memory", *REMOTE])
def place(request: pytest.FixtureRequest, url_of: UrlOf):
    fs, root = url_to_fs(url_of(request.param))
    fs.makedirs(f"{root}/a", exist_ok=True)
    return fs, f"{root}/a/state.json"


def test_a_swap_succeeds_only_for_the_current_state(place) -> None:
    nothing = cas.read(*place)
    assert nothing.data is None
    one = cas.swap(*place, nothing, b"1")
    assert one is not None and cas.read(*place) == one
    assert cas.swap(*place, nothing, b"x") is None
    two = cas.swap(*place, one, b"2")
    assert two is not None and two.data == b"2"
    assert cas.swap(*place, one, b"x") is None
    assert cas.swap(*place, nothing, b"x") is None
    assert cas.read(*place) == two


def test_one_of_many_concurrent_swaps_succeeds(place) -> None:
    rounds, each = 5, 4
    start = threading.Barrier(each)
    won: list[int] = []

    def change(name: int) -> None:
        for number in range(rounds):
            start.wait(60)
            seen = cas.read(*place)
            start.wait(60)
            if cas.swap(*place, seen, f"{number} {name}".encode()) is not None:
                won.append(number)

    at_once(*(partial(change, name) for name in range(each)))
    assert won == list(range(rounds))


def test_a_swap_with_a_lost_response_counts_as_done(place) -> None:
    seen = cas.read(*place)
    made = cas.swap(*place, seen, b"mine")
    assert cas.swap(*place, seen, b"mine") == made  # the client repeats its request


def test_a_file_is_created_once(place) -> None:
    fs, path = place
    assert cas.create(fs, path, b"first")
    assert not cas.create(fs, path, b"second")
    assert fs.cat_file(path) == b"first"
    assert [name.rpartition("/")[2] for name in fs.find(path.rpartition("/")[0])] == ["state.json"]


def test_a_swap_after_a_long_pause_fails(tmp_path: Path) -> None:
    """The number that it makes has been there and is gone: a higher one stands."""
    fs, path = url_to_fs(str(tmp_path / "state.json"))
    seen = first = cas.read(fs, path)
    for number in range(4):
        moved = cas.swap(fs, path, seen, b"%d" % number)
        assert moved is not None
        assert cas.swap(fs, path, first, b"late") is None
        seen = moved
    assert cas.read(fs, path).data == b"3"
    assert sorted(os.listdir(tmp_path)) == ["state.json.4"]


def test_a_swap_in_a_deleted_folder_fails(tmp_path: Path) -> None:
    fs, path = url_to_fs(str(tmp_path / "gone/state.json"))
    assert cas.swap(fs, path, cas.read(fs, path), b"1") is None
    assert not (tmp_path / "gone").exists()


def test_a_swap_whose_folder_is_deleted_right_after_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, root = url_to_fs(str(tmp_path / "locks"))
    fs.makedirs(root)
    create = cas.filesystems.create

    def create_and_delete(path: str, data: bytes) -> bool:
        created = create(path, data)
        fs.rm(root, recursive=True)
        return created

    monkeypatch.setattr(cas.filesystems, "create", create_and_delete)
    assert cas.swap(fs, f"{root}/state.json", cas.VersionedContent(None, 0), b"1") is None


def test_an_error_of_the_disk_is_not_an_absence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: str) -> list[str]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "listdir", fails)
    with pytest.raises(OSError, match="Input/output"):
        cas.read(*url_to_fs(str(tmp_path / "state.json")))


def test_a_store_without_conditional_writes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="dir:// has no conditional writes"):
        cas.read(DirFileSystem(str(tmp_path), url_to_fs(str(tmp_path))[0]), "state.json")


APPEND = """
import sys
from fsspec.core import url_to_fs
from artifacts.compare_and_swap import read, swap
fs, path = url_to_fs(sys.argv[1])
for turn in range(int(sys.argv[2])):
    mine, seen = f"{sys.argv[3]}.{turn}", read(fs, path)
    while mine not in (seen.data or b"").decode().split():
        data = f"{(seen.data or b'').decode()} {mine}".encode()
        seen = swap(fs, path, seen, data) or read(fs, path)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "turns"), [(4, 100), pytest.param(8, 2000, marks=pytest.mark.soak)]
)
def test_concurrent_writers_of_one_list_lose_nothing(
    tmp_path: Path, processes: int, turns: int
) -> None:
    path = str(tmp_path / "list")
    arguments = [[path, str(turns), str(n)] for n in range(processes)]
    started = [subprocess.Popen([sys.executable, "-c", APPEND, *given]) for given in arguments]
    assert [process.wait(600) for process in started] == [0] * processes
    data = cas.read(*url_to_fs(path)).data
    assert data is not None
    every = [f"{n}.{turn}" for n in range(processes) for turn in range(turns)]
    assert sorted(data.decode().split()) == sorted(every)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_removed_file_gives_its_bytes_even_if_the_response_was_lost(
    place, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, path = place
    assert cas.remove(fs, path) is None
    cas.create(fs, path, b"first")
    assert cas.remove(fs, path) == b"first"
    assert not fs.exists(path)
    cas.create(fs, path, b"second")
    for kind in (cas._Memory, cas._S3, cas._Gcs):
        delete = kind.delete

        def lost(self, path, seen, delete=delete) -> bool:
            delete(self, path, seen)
            return delete(self, path, seen)  # the client repeats its request

        monkeypatch.setattr(kind, "delete", lost)
    assert cas.remove(fs, path) == b"second"


@pytest.mark.parametrize("kind", ["memory", *REMOTE])
def test_a_removal_that_arrives_late_keeps_a_later_file(
    kind: str, url_of: UrlOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, root = url_to_fs(url_of(kind))
    path = f"{root}/manifest.json"
    cas.create(fs, path, b"first")
    swapper = cas._swapper(fs)

    def late(self, path, seen) -> bool:
        fs.pipe_file(path, b"second")
        return delete(self, path, seen)

    delete = type(swapper).delete
    monkeypatch.setattr(type(swapper), "delete", late)
    assert cas.remove(fs, path) is None
    assert fs.cat_file(path) == b"second"
