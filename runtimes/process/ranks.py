"""Which of the processes of a run this one is.

The names are torchrun's, so a run may also be started by it: RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, and MASTER_ADDR and MASTER_PORT to meet at. Or by MindSpore's msrun: RANK_ID,
MS_WORKER_NUM and DEVICE_ID, where MS_ROLE is MS_WORKER.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from runtimes.contract import WrongInput

#: Set for a process that the first one has started (launcher.py); torchrun does not set it.
FOLLOWER = "KILN_FOLLOWER"
_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}


@dataclass(frozen=True)
class Ranks:
    """This process's place among the processes of a run."""

    rank: int = 0  # of this process, from 0
    world: int = 1  # processes in all
    local_rank: int = 0  # of this process, among those of its machine
    local_world: int = 1  # processes of its machine; under msrun, those known of

    @classmethod
    def here(cls) -> Ranks:
        """As the environment says; one process alone without. Raises WrongInput."""
        if "RANK" not in os.environ and _by_msrun():
            local_rank = int(os.environ.get("DEVICE_ID") or 0)
            rank, world = os.environ.get("RANK_ID"), os.environ["MS_WORKER_NUM"]
            if rank is None:  # it would be known only once all have met
                raise WrongInput("msrun on several hosts: give each its number by --node_rank")
            return cls(int(rank), int(world), local_rank, local_rank + 1)
        place = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
        return cls(*(int(os.environ.get(name) or default) for name, default in place))

    @property
    def first(self) -> bool:
        """Whether this is the process that speaks and writes for all."""
        return self.rank == 0


def launched() -> bool:
    """Whether a launcher has started the processes of this run, and knows how many there are."""
    return "RANK" in os.environ or _by_msrun()


def is_msrun_scheduler() -> bool:
    """Whether msrun has started this process for the others to find each other, not to train."""
    return os.environ.get("MS_ROLE") == "MS_SCHED"


def adopt_mpi() -> None:
    """Say by torchrun's names what mpirun (gaudi_spawn) says by its own, where it has started this
    process beside others.

    Raises:
        WrongInput: they are of several hosts, and have not been told where to meet.
    """
    said = {name: os.environ[theirs] for name, theirs in _MPI.items() if theirs in os.environ}
    if int(said.get("WORLD_SIZE", 1)) == 1:
        return
    if "MASTER_ADDR" not in os.environ and said["WORLD_SIZE"] != said.get("LOCAL_WORLD_SIZE"):
        raise WrongInput("mpirun on several hosts: give each MASTER_ADDR, by `-x MASTER_ADDR=HOST`")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "12345")
    for name, value in said.items():
        os.environ.setdefault(name, value)


def _by_msrun() -> bool:
    return os.environ.get("MS_ROLE") == "MS_WORKER"


def is_follower() -> bool:
    """Whether this process was started by the first of its run, and ends with it."""
    return FOLLOWER in os.environ
