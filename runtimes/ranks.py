"""Which of the processes of a run this one is.

The names are torchrun's, so a run may also be started by it: RANK, WORLD_SIZE, LOCAL_RANK, and
MASTER_ADDR and MASTER_PORT to meet at.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """This process's place among the processes of a run."""

    rank: int = 0  # of this process, from 0
    world: int = 1  # processes in all
    local_rank: int = 0  # of this process, among those of its machine

    @classmethod
    def here(cls) -> Ranks:
        """As the environment says; one process alone without."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        rank, world, local_rank = (os.environ.get(name) for name in names)
        return cls(int(rank or 0), int(world or 1), int(local_rank or 0))

    @property
    def first(self) -> bool:
        """Whether this is the process that speaks and writes for all."""
        return self.rank == 0
