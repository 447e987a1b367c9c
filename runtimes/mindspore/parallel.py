"""Data parallelism over processes with replicated weights.

Processes find each other through MindSpore's scheduler, a rendezvous server. msrun starts it; in a
run without msrun, rank 0 does. It is `python -P -m runtimes.mindspore.parallel`.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Tensor, communication, ops

from configs.errors import Refused
from configs.secrets import one_line
from runtimes.contract import OneWriter, Writers
from runtimes.process.launcher import Ranks
from runtimes.process.socket_writers import SocketWriters

#: Bytes of gradients per all-reduce: a bucket saves one round trip per small array.
BUCKET = 64 * 2**20
#: Base of the two float32 digits of an integer; integers below its square are exact.
HALF = 2**16
#: Environment variable that msrun sets for each process.
STARTED = "MS_ROLE"


class SingleProcess:
    """A run with one process; base class of the parallel run."""

    def writers(self) -> Writers:
        """All processes, for a background thread. Collective."""
        return OneWriter()

    def sum_over_ranks(self, arrays: Sequence[Tensor]) -> list[Tensor]:
        """Sum arrays over all processes, as float32."""
        return list(arrays)

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any process."""
        return flag

    def broadcast(self, number: int) -> int:
        """Rank 0's number, on every process."""
        return number


class DataParallel(SingleProcess):
    """Each process computes its share of a batch, and the same update."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sum = ops.AllReduce(ops.ReduceOp.SUM)

    def sum_over_ranks(self, arrays: Sequence[Tensor]) -> list[Tensor]:
        sums: list[Tensor] = []
        for bucket in _buckets(arrays):
            flat = ops.concat([array.astype(ms.float32).reshape(-1) for array in bucket])
            parts = ops.split(self._sum(flat), [array.size for array in bucket])
            sums += [p.reshape(a.shape) for p, a in zip(parts, bucket, strict=True)]
        return sums

    def writers(self) -> Writers:
        # MindSpore's collectives wait for the device, so no background thread may call them.
        return SocketWriters(self._ranks, os.environ["MS_SCHED_HOST"], self.broadcast)

    def any(self, flag: bool) -> bool:
        return self._agree(int(flag)) > 0

    def broadcast(self, number: int) -> int:
        return self._agree(number if self._ranks.first else 0)

    def _agree(self, number: int) -> int:
        """Sum integers over all processes, as two digits: a CPU all-reduces float32 only."""
        halves = Tensor(np.array(divmod(number, HALF), np.float32))
        high, low = self._sum(halves).asnumpy().tolist()
        return int(high) * HALF + int(low)


def open_parallel(ranks: Ranks) -> SingleProcess:
    """Join the process group of the run, if it has several processes.

    Call it after the device is opened.

    Raises:
        TimeoutError: a process did not join in time.
        Refused: the number of processes differs from the job's.
    """
    if ranks.world == 1:
        return SingleProcess()
    if STARTED not in os.environ:
        meeting = {
            "MS_WORKER_NUM": str(ranks.world),
            "MS_SCHED_HOST": socket.gethostbyname(os.environ["MASTER_ADDR"]),  # it takes no name
            "MS_SCHED_PORT": os.environ["MASTER_PORT"],
        }
        os.environ |= meeting | {STARTED: "MS_WORKER", "MS_NODE_ID": str(ranks.rank)}
        if ranks.first:
            _start_scheduler()
    try:
        communication.init()
    except RuntimeError as error:
        words = f"not all processes of the run have connected: {one_line(error)}"
        raise TimeoutError(errno.ETIMEDOUT, words) from None
    if communication.get_group_size() != ranks.world:
        raise Refused(
            f"{communication.get_group_size()} processes have connected, the job has {ranks.world}"
        )
    return DataParallel(ranks)


def _start_scheduler() -> None:
    """Start the scheduler with a pipe as standard input, which closes when this process ends."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "runtimes.mindspore.parallel"],
        env={**os.environ, STARTED: "MS_SCHED"},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # its errors go to this process's standard error
    )
    _SCHEDULERS.append(process)


#: References that keep the pipes open until this process ends.
_SCHEDULERS: list[subprocess.Popen[bytes]] = []


def _buckets(arrays: Sequence[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = [[]]
    room = BUCKET
    for array in arrays:
        size = 4 * array.size
        if buckets[-1] and size > room:
            buckets.append([])
            room = BUCKET
        buckets[-1].append(array)
        room -= size
    return buckets


def serve() -> None:
    """Serve until all processes of the run have disconnected."""
    ms.set_device("CPU")
    ms.communication.init()


def _end_with_parent() -> None:
    """End with the parent process: its end of the standard input pipe closes when it ends."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm signals all; ranks need it at the end
    threading.Thread(target=_end_with_parent, daemon=True).start()
    serve()
