"""Several hosts at one run: each gives its share of a batch, and the first one writes.

On the devices they meet in XLA's own collectives. What the loops have to agree on (to stop, to go
back) they tell each other on the host, so that no device is waited for.
"""

from __future__ import annotations

import os
import socket

import torch.distributed as dist

from runtimes.process.ranks import Ranks
from runtimes.torch.parallel import TIMEOUT, Alone, Data


def meet(ranks: Ranks) -> Alone:
    """What the hosts agree by: `any` and `broadcast`."""
    if ranks.world == 1:
        return Alone()
    if not dist.is_initialized():
        if os.environ.get("MASTER_ADDR") == "127.0.0.1":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may lead nowhere
        dist.init_process_group("gloo", rank=ranks.rank, world_size=ranks.world, timeout=TIMEOUT)
    return Data(ranks)


def free_port() -> int:
    """One that the others may be met at."""
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])
