"""What tests watch an emulated device for: each of these makes the test fail that is within."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from device_emulator import build

#: Operators that autocast computes in half precision.
PRODUCTS = ("aten::convolution", "aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm")


@contextmanager
def no_host_syncs() -> Iterator[None]:
    """The host waits for the device: RuntimeError."""
    extension = build.load()
    extension.refuse_syncs(True)
    try:
        yield
    finally:
        extension.refuse_syncs(False)


@contextmanager
def casts(dtype: str) -> Iterator[None]:
    """Products are computed in another type than this one, such as `BFloat16`: AssertionError."""
    before = _products()
    yield
    done = {key: n - before.get(key, 0) for key, n in _products().items() if n > before.get(key, 0)}
    assert done, "no products were computed"
    assert {kind for _, kind in done} == {dtype}, done


def _products() -> dict[tuple[str, str], int]:
    counted: dict[Any, int] = build.load().by_type()
    return {key: count for key, count in counted.items() if key[0] in PRODUCTS}
