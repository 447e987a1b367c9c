"""Which graphs an emulated HPU has compiled."""

from __future__ import annotations

import os
from typing import Any

from hpu_emulator import build

#: Of HPU graphs and torch.compile: what was recorded.
recorded: set[Any] = set()
closed = False


def lazy() -> bool:
    """Whether operators are collected."""
    return os.environ.get("PT_HPU_LAZY_MODE") == "1"


def mark_step(device: str = "", sync: bool = False) -> None:
    """Run what was collected: compiled, unless it was before."""
    build.load().run_segment()


def close(now: bool) -> None:
    """Have anything new fail, or no more."""
    global closed
    closed = now
    build.load().close(now)


def record(key: Any) -> None:
    """Take note of what is recorded under a key."""
    if closed and key not in recorded:
        raise RuntimeError("emulated HPU: an HPU graph has to be recorded anew")
    recorded.add(key)


def compiled() -> int:
    """How many there are."""
    extension = build.load()
    return len(extension.graphs()) if lazy() else int(extension.counts()["recipes"])
