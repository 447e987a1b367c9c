"""The device mesh: shard batches and arrays over it, and gather arrays from it.

The mesh has axes `data` and `fsdp`. Batches are sharded over both; weights, moments and EMA are
sharded over `fsdp` (GSPMD, arXiv 2105.04663).

Some operators of PyTorch have PyTorch/XLA versions that are replaced here, in this process:

* `layer_norm` and `group_norm`: XLA's BatchNormTraining, by which PyTorch/XLA computes them, has no
  partitioning rule for rows. Each norm gathered the activations of all devices.
* `upsample_nearest2d`: XLA on a CPU lacks its gradient, and PyTorch/XLA computes it on the host.
* `scaled_dot_product_attention`: PyTorch/XLA's autocast has no rule for it. Norms leave queries and
  keys in float32 beside a bfloat16 value, which the operator refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
import torch_xla
import torch_xla.runtime as xr
from numpy.typing import NDArray
from torch_xla.core import xla_model as xm
from torch_xla.distributed import spmd

from runtimes.spmd.tpu_sharding import AXES, mesh_shape, shard_axes


class Mesh:
    """All devices of all hosts.

    Args:
        fsdp: number of devices that share each array.
        hosts: number of processes; each supplies its rows of a batch.

    Raises:
        Refused: `fsdp` does not divide the number of devices.
    """

    def __init__(self, fsdp: int | Literal["all"], hosts: int) -> None:
        self.count = xr.global_runtime_device_count()
        shape = mesh_shape(self.count, fsdp)
        self.mesh = spmd.Mesh(np.arange(self.count), shape, AXES)
        spmd.set_global_mesh(self.mesh)
        self.local = self.count // hosts  # devices of this host
        self.fsdp = shape[1]
        self._hosts = hosts
        self.device = torch_xla.device()
        if xr.device_type() == "TPU":
            from runtimes.xla.attention import XlaAttention  # imports JAX

            XlaAttention(shape).register()

    def shard_rows(self, array: NDArray[Any]) -> torch.Tensor:
        """Shard the batch [B * hosts, ...] of all hosts over all devices.

        Args:
            array: this host's rows [B, ...].
        """
        rows = (AXES, *(None for _ in array.shape[1:]))
        spec = spmd.ShardingSpec(self.mesh, rows, minibatch=self._hosts > 1)
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        (sent,) = xm.send_cpu_data_to_device([tensor], self.device, spec)
        return sent

    def shard(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a full array to the devices, sharded along `fsdp` where its shape permits."""
        return self._mark_sharding(tensor.to(self.device))

    def shard_module(self, module: torch.nn.Module) -> None:
        """Move a module's parameters and buffers to the devices, sharded as by `shard`."""
        module.to(self.device)
        for tensor in (*module.parameters(), *module.buffers()):
            self._mark_sharding(tensor)

    def _mark_sharding(self, tensor: torch.Tensor) -> torch.Tensor:
        """Annotate a tensor with its sharding; XLA transfers it only after the annotation."""
        spmd.mark_sharding(tensor, self.mesh, shard_axes(tensor.shape, self.fsdp))
        return tensor

    def _replicated(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy whose elements are on each device in the program; arrays keep their sharding."""
        copy = tensor.clone()
        spmd.annotate_custom_sharding(copy, self.mesh, (None,) * copy.ndim)
        return copy

    def local_rows(self, tensor: torch.Tensor) -> Any:
        """Index of the rows of an array on the devices that this host's devices have."""
        return rows_of([indices for _, indices in _local_indices(tensor)])

    def load_rows(self, tensor: torch.Tensor, rows: torch.Tensor) -> None:
        """Replace the values of an array on the devices, from its `local_rows`."""
        index = self.local_rows(tensor)
        if index is ...:
            tensor.data = self.shard(rows)
            return
        shards = _local_shards(tensor)
        for shard in shards:
            first, *others = shard.indices
            own = slice(first.start - index.start, first.stop - index.start)
            _data(shard).copy_(rows[(own, *others)])
        data = [s.data for s in shards]
        torch_xla._XLAC._load_local_shards(tensor, data, [s.shard_device for s in shards])

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """A sharded array with all elements on each device, and so its gradient."""
        return _Gathered.apply(tensor, self)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a full array to the host; a collective call of all hosts."""
        return self.copy_to_host(self.gather(tensor))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The array, or a copy of it with all elements on this host's devices; a collective call
        of all hosts."""
        torch_xla.sync()
        if _is_on_this_host(tensor):
            return tensor
        copy = tensor.detach().clone()
        spmd.mark_sharding(copy, self.mesh, (None,) * copy.ndim)
        torch_xla.sync()
        xm.wait_device_ops()
        return copy

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy an array to the host from this host's devices.

        The array is assembled from its shards: `.cpu()` would compile a program per array.
        """
        shards = _local_shards(tensor)
        whole: torch.Tensor = shards[0].data
        if shards[0].indices is not Ellipsis:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            for shard in shards:
                whole[tuple(shard.indices)] = _data(shard)
        return whole

    def fetch_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy this host's rows of a sharded array [B, ...] to the host."""
        spmd.mark_sharding(tensor, self.mesh, (AXES, *(None for _ in tensor.shape[1:])))
        return in_order([(_first_row(shard), _data(shard)) for shard in _local_shards(tensor)])


class _Gathered(torch.autograd.Function):
    """XLA computes a gradient that may be sharded from gathered activations; a replicated
    gradient is a sum over the devices."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        ctx.mesh = mesh
        return mesh._replicated(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.mesh._replicated(gradients[0]), None


def in_order(parts: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Concatenate shards in the order of their first row; empty shards are dropped."""
    return torch.cat([rows for _, rows in sorted(parts, key=lambda part: part[0]) if len(rows)])


def rows_of(indices: Sequence[Any]) -> Any:
    """Index of the rows that shards have together.

    Args:
        indices: indices of each shard, as torch_xla returns them: Ellipsis is the full array.
    """
    if any(index is Ellipsis or not index for index in indices):
        return ...
    return slice(min(i[0].start for i in indices), max(i[0].stop for i in indices))


def _local_indices(tensor: torch.Tensor) -> list[tuple[int, Any]]:
    """(replica, indices) of each shard on this host's devices."""
    (shards,) = torch_xla._XLAC._get_local_shard_replica_and_indices([tensor.detach()])
    return list(shards)


def _local_shards(tensor: torch.Tensor) -> list[Any]:
    """Shards of an array on this host's devices; waits until the array is computed."""
    torch_xla.sync()
    xm.wait_device_ops()
    return list(spmd.XLAShardedTensor(tensor.detach()).local_shards)


def _first_row(shard: Any) -> int:
    """Index of a shard's first row in the full array; 0 if a single device has the array."""
    return 0 if shard.indices is Ellipsis else int(shard.indices[0].start)


def _data(shard: Any) -> torch.Tensor:
    """Data of a shard without the padding that GSPMD adds to uneven shards."""
    if shard.indices is Ellipsis:
        return shard.data
    return shard.data[tuple(slice(0, part.stop - part.start) for part in shard.indices)]


def _is_on_this_host(tensor: torch.Tensor) -> bool:
    """Whether this host's devices have all elements; several devices may have the same elements."""
    shards = _local_indices(tensor)
    if any(indices is Ellipsis for _, indices in shards):
        return True
    places = {tuple((part.start, part.stop) for part in indices) for _, indices in shards}
    count = sum(math.prod(stop - start for start, stop in place) for place in places)
    return count == tensor.numel()


ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
#: The dispatcher forgets the registrations when this object is deleted.
_LIBRARY = torch.library.Library("aten", "IMPL")


def replace_operator(operator: torch._ops.OpOverload, function: Callable[..., Any]) -> None:
    """Compute an operator of XLA arrays by a function, with and without autograd."""
    for key in ("AutogradXLA", "XLA"):
        _LIBRARY.impl(operator, function, key, allow_override=True)


@cache
def replace_operators() -> None:
    """Replace the operators of this module; a second call changes nothing."""
    _LIBRARY.impl(ATTENTION, _attend_in_autocast, "AutocastXLA")
    replace_operator(torch.ops.aten.layer_norm.default, layer_norm)
    replace_operator(torch.ops.aten.group_norm.default, group_norm)
    replace_operator(torch.ops.aten.upsample_nearest2d.vec, upsample_nearest)


def layer_norm(
    inputs: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:
    """As torch.nn.functional.layer_norm; statistics in float32."""
    output = _normalized(inputs, tuple(range(-len(normalized_shape), 0)), eps)
    return _affine(output, weight, bias, inputs.dtype)


def group_norm(
    inputs: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """As torch.nn.functional.group_norm of [B, C, ...]; statistics in float32."""
    groups = inputs.reshape(len(inputs), num_groups, -1)
    output = _normalized(groups, (-1,), eps).reshape(inputs.shape)
    channels = (-1, *[1] * (inputs.ndim - 2))
    scale, shift = (array if array is None else array.reshape(channels) for array in (weight, bias))
    return _affine(output, scale, shift, inputs.dtype)


def upsample_nearest(
    inputs: torch.Tensor, output_size: Sequence[int] | None, scale_factors: Sequence[float] | None
) -> torch.Tensor:
    """Upsample [B, C, h, w] to a size, or by factors; each copies rows and columns."""
    batch, channels, height, width = inputs.shape
    if output_size is None:
        assert scale_factors is not None, "PyTorch requires one of the two"
        output_size = [int(height * scale_factors[0]), int(width * scale_factors[1])]
    if tuple(output_size) == (2 * height, 2 * width):
        twice = inputs[:, :, :, None, :, None].expand(batch, channels, height, 2, width, 2)
        return twice.reshape(batch, channels, 2 * height, 2 * width)
    rows, columns = (
        torch.arange(wanted, device=inputs.device) * there // wanted
        for wanted, there in zip(output_size, (height, width), strict=True)
    )
    return inputs.index_select(2, rows).index_select(3, columns)


def _normalized(inputs: torch.Tensor, axes: tuple[int, ...], eps: float) -> torch.Tensor:
    """Mean 0 and variance 1 along axes, in float32."""
    wide = inputs.float()
    centered = wide - wide.mean(axes, keepdim=True)
    return centered * torch.rsqrt(centered.square().mean(axes, keepdim=True) + eps)


def _affine(
    output: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Scale and shift, in the wider of a dtype and the weight's dtype, as norms on CUDA return."""
    if weight is None:
        return output.to(dtype)
    output = output * weight if bias is None else output * weight + bias
    return output.to(torch.promote_types(dtype, weight.dtype))


def _attend_in_autocast(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *arguments: Any,
    **options: Any,
) -> torch.Tensor:
    """Attention in the dtype of autocast; a boolean mask stays boolean."""
    dtype = torch.get_autocast_dtype("xla")
    arrays = [array.to(dtype) for array in (query, key, value)]
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.to(dtype)
    with torch.autocast("xla", enabled=False):
        return ATTENTION(*arrays, attn_mask, *arguments, **options)
