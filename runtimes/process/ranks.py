"""This process's rank, read from the launcher's environment variables.

Supported launchers: ours and torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT), mpirun (OMPI_COMM_WORLD_*), and MindSpore's msrun (RANK_ID, MS_WORKER_NUM, DEVICE_ID,
with MS_ROLE=MS_WORKER).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from runtimes.contract import WrongInput

#: Environment variable of the processes that launcher.py starts; torchrun does not set it.
FOLLOWER = "KILN_FOLLOWER"
_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}


@dataclass(frozen=True)
class Ranks:
    """Rank and world size of this process."""

    rank: int = 0  # of this process, from 0
    world: int = 1  # processes of the run
    local_rank: int = 0  # of this process, among those of its machine
    local_world: int = 1  # processes of its machine; under msrun, a lower bound

    @classmethod
    def here(cls) -> Ranks:
        """Read the environment; without a launcher, a single process. Raises WrongInput."""
        if "RANK" not in os.environ and _started_by_msrun():
            local_rank = int(os.environ.get("DEVICE_ID") or 0)
            rank, world = os.environ.get("RANK_ID"), os.environ["MS_WORKER_NUM"]
            if rank is None:  # msrun then assigns ranks only at the rendezvous
                raise WrongInput("msrun on several hosts: pass --node_rank to each msrun")
            return cls(int(rank), int(world), local_rank, local_rank + 1)
        defaults = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
        return cls(*(int(os.environ.get(name) or default) for name, default in defaults))

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which alone emits events and writes all but checkpoints."""
        return self.rank == 0


def launched() -> bool:
    """Whether torchrun, mpirun, msrun or ours has started the processes of this run."""
    return "RANK" in os.environ or _started_by_msrun()


def is_msrun_scheduler() -> bool:
    """Whether msrun started this process as its rendezvous server, which does not train."""
    return os.environ.get("MS_ROLE") == "MS_SCHED"


def adopt_mpi() -> None:
    """Set torchrun's environment variables from mpirun's (also gaudi_spawn's), if there are several
    processes.

    Raises:
        WrongInput: the processes run on several hosts and MASTER_ADDR is not set.
    """
    found = {name: os.environ[theirs] for name, theirs in _MPI.items() if theirs in os.environ}
    if int(found.get("WORLD_SIZE", 1)) == 1:
        return
    if "MASTER_ADDR" not in os.environ and found["WORLD_SIZE"] != found.get("LOCAL_WORLD_SIZE"):
        raise WrongInput("mpirun on several hosts: add `-x MASTER_ADDR=HOST` to its command line")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "12345")
    for name, value in found.items():
        os.environ.setdefault(name, value)


def _started_by_msrun() -> bool:
    return os.environ.get("MS_ROLE") == "MS_WORKER"


def is_follower() -> bool:
    """Whether rank 0's launcher started this process, which must end when rank 0 does."""
    return FOLLOWER in os.environ
