"""What tests watch an emulated HPU for: each of these makes the test fail that is within."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from device_emulator.watch import PRODUCTS, casts, no_host_syncs

from hpu_emulator import graphs

__all__ = ["PRODUCTS", "casts", "no_host_syncs", "no_new_graphs"]


@contextmanager
def no_new_graphs() -> Iterator[None]:
    """Something has to be compiled that was not before: RuntimeError."""
    graphs.close(True)
    try:
        yield
    finally:
        graphs.close(False)
