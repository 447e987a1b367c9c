"""Coordinate the hosts of a run.

XLA's collectives reduce arrays on the devices. Decisions, such as to stop or to resume from a
step, are exchanged between hosts by torch.distributed.
"""

from __future__ import annotations

import socket

from runtimes.process.collectives import HostCollectives, join
from runtimes.process.ranks import Ranks


def join_hosts(ranks: Ranks) -> HostCollectives:
    """Join the process group of the run, if it has several hosts."""
    if ranks.world > 1:
        join(ranks)
    return HostCollectives(ranks.world)


def free_port() -> int:
    """A free TCP port of this host. Another process may claim it before it is used."""
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])
