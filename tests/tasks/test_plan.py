"""Planning: which batch fits is found by few compilations, and a plan that was made is kept."""

from dataclasses import replace

import pytest

from runtimes.jax.chips import parse_slice
from runtimes.jax.plan import Plan
from tasks.plan import Size, _largest

SLICE = parse_slice("v5e-8")
GIB = 2**30
PLAN = Plan("a compiler", 8, 2 * GIB, 0, 0, 1e12, 1e9, 0.1, 1e12, 10, 1.0, True)


class Measured:
    """A step that takes so many bytes a picture, and counts how often it is asked for."""

    def __init__(self, bytes_a_picture: float, extra: float = 0.0) -> None:
        self.bytes_a_picture, self.extra, self.asked = bytes_a_picture, extra, list[int]()

    def __call__(self, size: Size) -> Plan:
        self.asked.append(size.per_chip)
        temporaries = int(self.extra + self.bytes_a_picture * size.per_chip)
        total = PLAN.arguments + temporaries
        return replace(
            PLAN, temporaries=temporaries, total=total, fits=total <= SLICE.chip.hbm_bytes
        )


@pytest.mark.parametrize("start", [1, 4, 64])
@pytest.mark.parametrize("extra", [0.0, 1.5 * GIB])
def test_the_largest_batch_that_fits_is_found_in_a_few_compilations(
    start: int, extra: float
) -> None:
    measured = Measured(0.4 * GIB, extra)
    found = _largest(measured, Size(start, 1, SLICE))  # type: ignore[arg-type]
    assert found is not None
    assert found.per_chip == int((14 * GIB - extra) / (0.4 * GIB))
    assert found.micro_batch_size == found.per_chip * 8
    assert len(measured.asked) <= 6, measured.asked


def test_where_one_picture_does_not_fit_none_is_found() -> None:
    assert _largest(Measured(20.0 * GIB), Size(4, 1, SLICE)) is None  # type: ignore[arg-type]
