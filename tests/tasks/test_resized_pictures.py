"""The pictures of a shard in one file."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tasks.download.resized_pictures import ResizedPictures


def test_each_row_has_its_own_picture_whichever_thread_adds_it(tmp_path: Path) -> None:
    added = {row: bytes([row]) * (1000 * row) for row in range(100)}
    with ResizedPictures(tmp_path / "pictures") as pictures, ThreadPoolExecutor(4) as threads:
        list(threads.map(pictures.add, added, added.values()))
        assert pictures.read(8) == added[8]
        pictures.add(7, b"again")
        assert {row: pictures.read(row) for row in added} == added | {7: b"again"}
        with pytest.raises(KeyError):
            pictures.read(100)


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
