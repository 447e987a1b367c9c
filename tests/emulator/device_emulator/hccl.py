"""Backend hccl of torch.distributed, of Ascend and Gaudi alike: gloo, on the memory of an emulated
device."""

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist


class _Hccl(dist.ProcessGroup):
    """What DistributedDataParallel and the update call."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        on_host = [tensor.cpu() for tensor in tensors]
        self._gloo.allreduce(on_host, options or dist.AllreduceOptions()).wait()
        return self._back(on_host, tensors)

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        on_host = [tensor.cpu() for tensor in tensors]
        self._gloo.broadcast(on_host, options or dist.BroadcastOptions()).wait()
        return self._back(on_host, tensors)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None
    ) -> Any:
        on_host = [[tensor.cpu() for tensor in row] for row in outputs]
        given = [tensor.cpu() for tensor in inputs]
        self._gloo.allgather(on_host, given, options or dist.AllgatherOptions()).wait()
        return self._back(list(chain(*on_host)), list(chain(*outputs)))

    def getBackendName(self) -> str:  # noqa: N802  # by its C++ name
        return "hccl"

    @staticmethod
    def _back(found: list[torch.Tensor], tensors: list[torch.Tensor]) -> Any:
        for tensor, value in zip(tensors, found, strict=True):
            tensor.copy_(value)
        future: Any = torch.futures.Future()
        future.set_result(tensors)
        return torch._C._distributed_c10d._create_work_from_future(future)


def register(device: str) -> None:
    """Have torch.distributed know it, for a kind of device."""
    dist.Backend.register_backend("hccl", _Hccl, devices=[device])
