"""A header's tensors fill the file: none overlaps another, none is beside it."""

import io
import json

import numpy as np
import pytest

from artifacts.tensor_header import read_header

F32 = {"F32": np.dtype("<f4")}


def file(*offsets: tuple[int, int], size: int = 16) -> io.BytesIO:
    header = {
        f"t{n}": {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end]}
        for n, (start, end) in enumerate(offsets)
    }
    text = json.dumps(header).encode()
    return io.BytesIO(len(text).to_bytes(8, "little") + text + bytes(size))


def test_tensors_side_by_side_are_read() -> None:
    _, places = read_header(file((8, 16), (0, 8)), F32)
    assert list(places) == ["t1", "t0"]
    assert places["t0"].start - places["t1"].start == 8


@pytest.mark.parametrize(
    ("offsets", "size"),
    [
        ([(0, 8), (4, 16)], 16),
        ([(0, 8), (0, 8)], 8),
        ([(0, 8), (0, 8)], 16),
        ([(0, 8), (12, 16)], 16),
        ([(4, 16)], 16),
        ([(0, 16)], 20),
        ([(0, 16)], 12),
    ],
)
def test_tensors_that_overlap_or_leave_bytes_over_are_refused(
    offsets: list[tuple[int, int]], size: int
) -> None:
    with pytest.raises(ValueError, match=r"does not begin|its length differs"):
        read_header(file(*offsets, size=size), F32)
