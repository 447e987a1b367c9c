"""Several hosts at one run: each gives its share of a batch, and the first one writes.

On the devices they meet in XLA's own collectives. What the loops have to agree on (to stop, to go
back) they tell each other on the host, so that no device is waited for.
"""

from __future__ import annotations

import torch.distributed as dist

from runtimes.ranks import Ranks
from runtimes.torch.parallel import TIMEOUT, Alone, Data


def meet(ranks: Ranks) -> Alone:
    """What the hosts agree by: `any` and `broadcast`."""
    if ranks.world == 1:
        return Alone()
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=ranks.rank, world_size=ranks.world, timeout=TIMEOUT)
    return Data(ranks)
