"""What processes of a run agree on by gloo, on the host, so that no device is waited for."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from runtimes.process.ranks import Ranks

#: How long a process waits for another. The first one's pauses are shorter, also when a large
#: checkpoint goes to a slow store; launcher.py notices a lost process of this machine.
TIMEOUT = timedelta(hours=1)


def join(ranks: Ranks, backend: str = "gloo") -> None:
    """Join the process group of a run, once."""
    if dist.is_initialized():
        return
    if os.environ.get("MASTER_ADDR") == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may lead nowhere
    dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.world, timeout=TIMEOUT)


class Agreement:
    """Decisions of all processes; of one alone, its own."""

    def __init__(self, world: int) -> None:
        self.world = world

    def any(self, flag: bool) -> bool:
        """Whether any process says so. Every process calls it at the same place."""
        if self.world == 1:
            return flag
        said = torch.tensor(int(flag))
        dist.all_reduce(said, dist.ReduceOp.MAX)
        return bool(said)

    def broadcast(self, number: int) -> int:
        """The first process's number. Every process calls it at the same place."""
        if self.world == 1:
            return number
        said = torch.tensor(number)
        dist.broadcast(said, 0)
        return int(said)
