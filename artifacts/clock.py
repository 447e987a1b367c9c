"""A clock that tests can replace, for measuring and waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


def seconds_since_boot() -> float:
    """Monotonic time; on Linux it also advances while the machine is suspended."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)  # Linux only
    return time.monotonic() if clock is None else time.clock_gettime(clock)


@dataclass(frozen=True)
class Clock:
    """Monotonic time in seconds, and a sleep."""

    now: Callable[[], float] = seconds_since_boot
    sleep: Callable[[float], None] = time.sleep


REAL = Clock()
