"""Collectives of a run's processes on the host (gloo), which do not synchronize a device."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from runtimes.process.launcher import Ranks

#: Time limit of a collective, longer than a rank needs to write its part of a large checkpoint.
#: launcher.py detects a lost process of this machine much earlier.
TIMEOUT = timedelta(hours=1)


def join(ranks: Ranks, backend: str = "gloo") -> None:
    """Initialise the run's process group, unless it exists."""
    if dist.is_initialized():
        return
    # By default gloo announces the address of the host's own name. That name may not resolve, or to
    # a loopback address (Debian's 127.0.1.1), which other hosts cannot reach.
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := _interface_to_rank_0()):
        os.environ["GLOO_SOCKET_IFNAME"] = name
    dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.world, timeout=TIMEOUT)


def _interface_to_rank_0() -> str | None:
    """Name of the network interface by which this host reaches MASTER_ADDR, if there is one."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:  # it sends nothing
            route.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
            own = route.getsockname()[0]
    except (KeyError, OSError):  # gloo will say what it cannot reach
        return None
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, all_ in interfaces if own in (a.address for a in all_)), None)


class HostCollectives:
    """Host collectives over `world` processes; a single process needs no process group.

    Args:
        group: a process group of all processes; None is the default one. Two threads of a process
            must not use the same group.
    """

    def __init__(self, world: int, group: Any = None) -> None:
        self.world = world
        self.rank = dist.get_rank() if world > 1 else 0
        self._group = group

    def writers(self) -> HostCollectives:
        """The same collectives for a background thread. Collective."""
        if self.world == 1:
            return self
        return HostCollectives(self.world, dist.new_group(backend="gloo", timeout=TIMEOUT))

    def any(self, flag: bool) -> bool:
        """Logical or of `flag` over all processes. Collective."""
        if self.world == 1:
            return flag
        value = torch.tensor(int(flag))
        dist.all_reduce(value, dist.ReduceOp.MAX, self._group)
        return bool(value)

    def broadcast(self, number: int) -> int:
        """Rank 0's `number`. Collective."""
        if self.world == 1:
            return number
        value = torch.tensor(number)
        dist.broadcast(value, 0, self._group)
        return int(value)

    def gather(self, data: bytes) -> list[bytes]:
        """The data of every process, by rank. Collective."""
        if self.world == 1:
            return [data]
        sizes = self._all_gather(torch.tensor([len(data)]))
        padded = bytearray(data).ljust(max(1, *(int(size) for size in sizes)), b"\0")
        parts = self._all_gather(torch.frombuffer(padded, dtype=torch.uint8))
        return [bytes(d[: int(n)].numpy()) for d, n in zip(parts, sizes, strict=True)]

    def _all_gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(value) for _ in range(self.world)]
        dist.all_gather(gathered, value, self._group)
        return gathered


def join_hosts(ranks: Ranks) -> HostCollectives:
    """The collectives of a run, whose process group this host joins if there are several.

    XLA's collectives reduce arrays on the devices. Decisions, such as to stop or to resume from a
    step, are exchanged here.
    """
    if ranks.world > 1:
        join(ranks)
    return HostCollectives(ranks.world)


def free_port() -> int:
    """A free TCP port of this host. Another process may claim it before it is used."""
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])
