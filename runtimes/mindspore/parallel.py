"""Several processes at one run, each with all weights: how their gradients come together.

They meet as `msrun` has them meet: a scheduler tells each where the others are. Where msrun has
started this process, the scheduler is there; otherwise the first process starts it.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Tensor, communication, ops

from runtimes.contract import WrongInput
from runtimes.process.ranks import Ranks

#: Bytes of gradients that are sent at a time: many small ones cost a round trip each.
BUCKET = 64 * 2**20
#: Numbers up to its square are exact when they are sent as two float32.
HALF = 2**16
#: What msrun sets for each process.
STARTED = "MS_ROLE"


class SingleProcess:
    """One process."""

    def sum_over_ranks(self, arrays: Sequence[Tensor]) -> list[Tensor]:
        """The sums of arrays over all processes."""
        return list(arrays)

    def any(self, flag: bool) -> bool:
        """Whether any process says so."""
        return flag

    def broadcast(self, number: int) -> int:
        """The first process's number."""
        return number


class DataParallel(SingleProcess):
    """Each process takes its share of a batch, and updates everything alike."""

    def __init__(self, ranks: Ranks) -> None:
        self._first = ranks.first
        self._sum = ops.AllReduce(ops.ReduceOp.SUM)

    def sum_over_ranks(self, arrays: Sequence[Tensor]) -> list[Tensor]:
        found: list[Tensor] = []
        for bucket in _buckets(arrays):
            flat = ops.concat([array.astype(ms.float32).reshape(-1) for array in bucket])
            sizes = [array.size for array in bucket]
            parts = ops.split(self._sum(flat), sizes)
            found += [p.reshape(a.shape) for p, a in zip(parts, bucket, strict=True)]
        return found

    def any(self, flag: bool) -> bool:
        return self._agree(int(flag)) > 0

    def broadcast(self, number: int) -> int:
        return self._agree(number if self._first else 0)

    def _agree(self, number: int) -> int:
        """The sum of all processes' numbers, in two halves: a CPU sums float32 alone."""
        halves = Tensor(np.array(divmod(number, HALF), np.float32))
        high, low = self._sum(halves).asnumpy().tolist()
        return int(high) * HALF + int(low)


def open_parallel(ranks: Ranks) -> SingleProcess:
    """Meet the other processes, if there are any. Call it once the device is open.

    Raises:
        TimeoutError: they do not meet.
        WrongInput: others meet than were to.
    """
    if ranks.world == 1:
        return SingleProcess()
    if STARTED not in os.environ:
        meeting = {
            "MS_WORKER_NUM": str(ranks.world),
            "MS_SCHED_HOST": os.environ["MASTER_ADDR"],
            "MS_SCHED_PORT": os.environ["MASTER_PORT"],
        }
        os.environ |= meeting | {STARTED: "MS_WORKER", "MS_NODE_ID": str(ranks.rank)}
        if ranks.first:
            _start_scheduler()
    try:
        communication.init()
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        words = f"the processes of the run do not meet: {reason}"
        raise TimeoutError(errno.ETIMEDOUT, words) from None
    if communication.get_group_size() != ranks.world:
        raise WrongInput(f"{communication.get_group_size()} processes met, not {ranks.world}")
    return DataParallel(ranks)


def _start_scheduler() -> None:
    """Its standard input is a pipe from us, which ends with us."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "runtimes.mindspore.rendezvous"],
        env={**os.environ, STARTED: "MS_SCHED"},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # what it has to complain of is for our log
    )
    _SCHEDULERS.append(process)


#: Held for all of this process's life, as their pipes must be.
_SCHEDULERS: list[subprocess.Popen[bytes]] = []


def _buckets(arrays: Sequence[Tensor]) -> list[list[Tensor]]:
    found: list[list[Tensor]] = [[]]
    room = BUCKET
    for array in arrays:
        size = 4 * array.size
        if found[-1] and size > room:
            found.append([])
            room = BUCKET
        found[-1].append(array)
        room -= size
    return found
