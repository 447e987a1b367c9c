"""Kinds of faults, and the schedule of a round: a function of the seed alone."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

#: Seconds without a heartbeat after which a lock expires here, and between heartbeats.
EXPIRY, HEARTBEAT = 1.2, 0.15
DAY = 86400.0

EVERYWHERE = {
    "killed": 5,  # SIGKILL, before or after the present request has had its effect
    "paused": 4,  # SIGSTOP past the expiry of locks, then SIGCONT
    "cut off": 3,  # no request of the process gets through, past the expiry of locks
    "request fails": 4,  # without effect
    "answer late": 3,
    "answer lost": 4,  # with effect: the client repeats, or fails
    "clock jumps": 3,
    "file truncated": 2,
    "file flipped": 3,  # one bit; on a local disk, half of them under the time stamp it had
}
LOCAL = {"no space": 4}
REMOTE = {
    "request twice": 3,  # both arrive, one after the other
    "request late": 3,  # the client hears of an error; what it asked for happens after that
}
STORES = {"local": EVERYWHERE | LOCAL, "s3": EVERYWHERE | REMOTE, "gcs": EVERYWHERE | REMOTE}
#: Requests of a process between two faults, at the most; servers answer more slowly than disks.
MOST_REQUESTS = {"local": 400, "s3": 100, "gcs": 200}


@dataclass(frozen=True)
class Fault:
    """One fault that happens to one process.

    Attributes:
        after: requests of the process to the store since its previous fault.
        seconds: how long a pause, cut or delay lasts, or how far a clock jumps.
        choice: a number in [0, 1) that settles all other choices.
    """

    kind: str
    after: int
    seconds: float
    choice: float


def schedule(store: str, slots: int, count: int, chance: Random) -> list[list[Fault]]:
    """`count` faults dealt to `slots` processes; the kinds have the shares above."""
    kinds = STORES[store]
    deck: list[str] = []
    while len(deck) < count:
        deal = [kind for kind, share in kinds.items() for _ in range(share)]
        chance.shuffle(deal)
        deck += deal
    most = MOST_REQUESTS[store]
    faults = [_fault(kind, most, chance) for kind in deck[:count]]
    return [faults[slot::slots] for slot in range(slots)]


def _fault(kind: str, after: int, chance: Random) -> Fault:
    least, most = {
        "paused": (EXPIRY * 1.2, EXPIRY * 2),
        "cut off": (EXPIRY * 1.2, EXPIRY * 2),
        "answer late": (0.1, 0.8),
        "request late": (0.05, EXPIRY * 1.5),
        "clock jumps": (-3 * EXPIRY, 3 * EXPIRY),
    }.get(kind, (0, 0))
    return Fault(kind, chance.randint(2, after), chance.uniform(least, most), chance.random())
