"""A reader under test, its inputs, and what becomes of each of them."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from types import FrameType

#: Seconds of processor time for one input; more counts as a hang.
MOST_SECONDS = 5.0


@dataclass(frozen=True)
class Reader:
    """One reader of input that others wrote.

    Args:
        share: relative number of inputs.
        read: reads one input, drawn from random numbers. True: accepted; False: refused by the
            documented error. Any other exception is a fault; AssertionError: a wrong acceptance.
    """

    name: str
    share: int
    read: Callable[[Random], bool]


class Hang(Exception):
    """An input took too long."""


@dataclass
class Outcomes:
    """What became of a reader's inputs; `faults` has the first input of each distinct fault."""

    accepted: int = 0
    refused: int = 0
    faulty: int = 0
    faults: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


def fuzz(reader: Reader, count: int, seed: str, first: int = 0) -> Outcomes:
    """Read inputs [first, first + count): input n is a pure function of (seed, reader, n)."""
    found = Outcomes()
    for number in range(first, first + count):
        try:
            with _limit():
                accepted = reader.read(Random(f"{seed} {reader.name} {number}"))
        except Exception as error:
            found.faulty += 1
            place = _place(error)
            found.counts[place] += 1
            how = f"{type(error).__name__}: {str(error)[:200]}"
            found.faults.setdefault(place, f"input {number}: {how}")
        else:
            found.accepted += accepted
            found.refused += not accepted
    return found


@contextmanager
def _limit() -> Iterator[None]:
    def stop(signum: int, frame: FrameType | None) -> None:
        raise Hang(f"more than {MOST_SECONDS:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _place(error: Exception) -> str:
    """The type of an error and the last line of ours that it passed."""
    at, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "site-packages" not in file and "/lib/python" not in file:
            at = f"{'/'.join(file.split('/')[-2:])}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(error).__name__} at {at}"
