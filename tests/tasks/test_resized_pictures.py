"""The pictures of a shard in one file."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tasks.download.shard import ResizedPictures


def test_each_row_has_its_own_picture_whichever_thread_adds_it(tmp_path: Path) -> None:
    added = {row: bytes([row]) * (1000 * row) for row in range(100)}
    with ResizedPictures(tmp_path / "pictures") as pictures, ThreadPoolExecutor(4) as threads:
        list(threads.map(pictures.add, added, added.values()))
        assert pictures.read(50) == added[50]  # other pictures are behind it
        pictures.add(0, b"again")
        assert {row: pictures.read(row) for row in added} == added | {0: b"again"}
        with pytest.raises(KeyError):
            pictures.read(100)


def test_two_threads_write_to_two_places(tmp_path: Path) -> None:
    class Halting:
        """A file at whose end both threads would be, but for the lock."""

        def __init__(self, file: object) -> None:
            self.file = file

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def seek(self, *place: int) -> int:
            found = int(self.file.seek(*place))  # type: ignore[attr-defined]
            time.sleep(0.05)
            return found

    added = {row: bytes([row]) * 10 for row in range(4)}
    with ResizedPictures(tmp_path / "pictures") as pictures, ThreadPoolExecutor(4) as threads:
        pictures._file = Halting(pictures._file)  # type: ignore[assignment]
        list(threads.map(pictures.add, added, added.values()))
        assert {row: pictures.read(row) for row in added} == added


def test_a_decoder_of_an_interrupted_run_writes_to_no_other_file(tmp_path: Path) -> None:
    """A close between the look for a file's descriptor and the write would let it."""
    with ResizedPictures(tmp_path / "pictures") as pictures, ThreadPoolExecutor(1) as threads:
        with pictures._lock:  # a decoder writes
            closing = threads.submit(pictures.__exit__)
            with pytest.raises(TimeoutError):
                closing.result(timeout=0.1)
        closing.result()
        with pytest.raises(ValueError, match="closed"):
            pictures.add(0, b"late")


def test_a_picture_that_the_disk_takes_in_parts_is_whole(tmp_path: Path) -> None:
    class Slow:
        def __init__(self, file: object) -> None:
            self.file = file

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def write(self, data: memoryview) -> int:
            return int(self.file.write(data[:3]))  # type: ignore[attr-defined]

    with ResizedPictures(tmp_path / "pictures") as pictures:
        pictures._file = Slow(pictures._file)  # type: ignore[assignment]
        pictures.add(0, b"0123456789")
        assert pictures.read(0) == b"0123456789"
