"""Several hosts at one run: each gives its share of a batch, and the first one writes.

Arrays meet in XLA's own collectives; decisions (to stop, to go back) meet on the hosts.
"""

from __future__ import annotations

import socket

from runtimes.process.collectives import HostCollectives, join
from runtimes.process.ranks import Ranks


def meet(ranks: Ranks) -> HostCollectives:
    """Join the run's other hosts, if there are any."""
    if ranks.world > 1:
        join(ranks)
    return HostCollectives(ranks.world)


def free_port() -> int:
    """A free port of this host, at which the others can reach it."""
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])
