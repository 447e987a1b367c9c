"""The mesh of devices: how batches and arrays are spread over it.

It has two axes. All devices share a batch; those along `fsdp` share every array as well, so that
weights, moments and average take a part of the memory on each (GSPMD, arXiv 2105.04663).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch_xla
import torch_xla.runtime as xr
from numpy.typing import NDArray
from torch_xla.core import xla_model as xm
from torch_xla.distributed import spmd

from runtimes.contract import WrongInput
from runtimes.data.padding import padded_rows
from runtimes.spmd.sharding import AXES, mesh_shape, shard_axes

Spec = tuple[Any, ...]


class Mesh:
    """All devices of all hosts.

    Args:
        fsdp: how many share each array.
        hosts: processes, each of which gives its share of a batch.

    Raises:
        WrongInput: `fsdp` does not divide the number of devices.
    """

    def __init__(self, fsdp: int | Literal["all"], hosts: int) -> None:
        self.count = xr.global_runtime_device_count()
        shape = mesh_shape(self.count, fsdp)
        self.mesh = spmd.Mesh(np.arange(self.count), shape, AXES)
        spmd.set_global_mesh(self.mesh)
        self.local = self.count // hosts  # devices of this host
        self._fsdp, self._hosts, self._device = shape[1], hosts, torch_xla.device()

    def check_rows(self, count: int) -> None:
        """Raise WrongInput for a host's share of a batch that its devices cannot share evenly."""
        if self._hosts > 1 and count % self.local:
            raise WrongInput(
                f"{count} samples of a host cannot be shared by its {self.local} devices: change "
                "train.global_batch_size or micro_batch_size"
            )

    def padded_rows(self, rows: int) -> int:
        """So many rows, or as few more as give each device of this host as many."""
        return padded_rows(rows, self.local)

    def shard_rows(self, array: NDArray[Any]) -> torch.Tensor:
        """An array [B, ...] of this host's rows on the devices, which share those of all hosts."""
        rows: Spec = (AXES, *(None for _ in array.shape[1:]))
        spec = spmd.ShardingSpec(self.mesh, rows, minibatch=self._hosts > 1)
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        (sent,) = xm.send_cpu_data_to_device([tensor], self._device, spec)
        return sent

    def shard(self, tensor: torch.Tensor) -> torch.Tensor:
        """A whole array on the devices, shared along `fsdp` where that is possible."""
        return self._mark_sharding(tensor.to(self._device))

    def shard_module(self, module: torch.nn.Module) -> None:
        """Put a module's parameters and buffers on the devices, as `put` does."""
        module.to(self._device)
        for tensor in (*module.parameters(), *module.buffers()):
            self._mark_sharding(tensor)

    def _mark_sharding(self, tensor: torch.Tensor) -> torch.Tensor:
        """Say how an array is spread: it is sent no sooner than that is known."""
        spmd.mark_sharding(tensor, self.mesh, shard_axes(tensor.shape, self._fsdp))
        return tensor

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A whole array on the host, put together from its parts: `.cpu()` would compile a program
        for each. Every host calls it alike."""
        shards = _parts(tensor)
        if _covered(shards) < tensor.numel():  # the rest is on other hosts
            copy = tensor.detach().clone()
            spmd.mark_sharding(copy, self.mesh, (None,) * copy.ndim)
            shards = _parts(copy)
        return _joined(shards, tensor)

    def fetch_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of an array [B, ...] that was just computed, the rows that this host gave."""
        spmd.mark_sharding(tensor, self.mesh, (AXES, *(None for _ in tensor.shape[1:])))
        return in_order([(_first_row(shard), _data(shard)) for shard in _parts(tensor)])


def in_order(parts: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Rows of parts, each with the number of its first row; empty ones are left out."""
    return torch.cat([rows for _, rows in sorted(parts, key=lambda part: part[0]) if len(rows)])


def _parts(tensor: torch.Tensor) -> list[Any]:
    """What this host's devices hold of an array, once it is computed."""
    torch_xla.sync()
    xm.wait_device_ops()
    return list(spmd.XLAShardedTensor(tensor.detach()).local_shards)


def _first_row(shard: Any) -> int:
    """Of an array, the row that a part begins with; one device has all of them."""
    return 0 if shard.indices is Ellipsis else int(shard.indices[0].start)


def _data(shard: Any) -> torch.Tensor:
    """Without padding."""
    if shard.indices is Ellipsis:
        return shard.data
    return shard.data[tuple(slice(0, part.stop - part.start) for part in shard.indices)]


def _covered(shards: Sequence[Any]) -> int:
    """Numbers of the array that are among the parts; several devices may hold the same."""
    if shards[0].indices is Ellipsis:
        return shards[0].data.numel()
    places = {tuple((part.start, part.stop) for part in shard.indices) for shard in shards}
    return sum(math.prod(stop - start for start, stop in place) for place in places)


def _joined(shards: Sequence[Any], like: torch.Tensor) -> torch.Tensor:
    if shards[0].indices is Ellipsis:
        return shards[0].data
    whole = torch.empty(like.shape, dtype=like.dtype)
    for shard in shards:
        whole[tuple(shard.indices)] = _data(shard)
    return whole
