"""What libtpu is told on a host that computes apart from its slice."""

from pathlib import Path

import pytest

from runtimes.process.tpu_host import alone


@pytest.mark.parametrize(
    ("files", "bounds", "chips"),
    [
        (["accel0", "accel1", "accel2", "accel3"], "2,2,1", "0,1,2,3"),
        (["vfio/0", "vfio/vfio"], "1,1,1", "0"),
        ([f"vfio/{chip}" for chip in range(8)], "2,4,1", "0,1,2,3,4,5,6,7"),
    ],
)
def test_a_host_apart_has_its_own_chips(
    tmp_path: Path, files: list[str], bounds: str, chips: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    told = alone(tmp_path)
    assert told["TPU_PROCESS_BOUNDS"] == "1,1,1"
    assert told["TPU_CHIPS_PER_PROCESS_BOUNDS"] == bounds
    assert told["TPU_VISIBLE_CHIPS"] == chips


def test_a_host_without_chips_is_told_nothing(tmp_path: Path) -> None:
    assert alone(tmp_path) == {}
