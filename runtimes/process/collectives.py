"""Collectives of a run's processes on the host (gloo), which do not synchronize a device."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from runtimes.process.ranks import Ranks

#: Time limit of a collective, longer than rank 0 needs to write a large checkpoint to a slow store.
#: launcher.py detects a lost process of this machine much earlier.
TIMEOUT = timedelta(hours=1)


def join(ranks: Ranks, backend: str = "gloo") -> None:
    """Initialise the run's process group, unless it exists."""
    if dist.is_initialized():
        return
    if os.environ.get("MASTER_ADDR") == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name may not resolve
    dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.world, timeout=TIMEOUT)


class HostCollectives:
    """Host collectives over `world` processes; a single process needs no process group."""

    def __init__(self, world: int) -> None:
        self.world = world

    def any(self, flag: bool) -> bool:
        """Logical or of `flag` over all processes. Collective."""
        if self.world == 1:
            return flag
        value = torch.tensor(int(flag))
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return bool(value)

    def broadcast(self, number: int) -> int:
        """Rank 0's `number`. Collective."""
        if self.world == 1:
            return number
        value = torch.tensor(number)
        dist.broadcast(value, 0)
        return int(value)
