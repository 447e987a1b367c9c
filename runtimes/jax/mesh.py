"""The device mesh: shard batches and arrays over it, and gather arrays from it.

The mesh has axes `data` and `fsdp`. Batches are sharded over both; weights, moments and EMA are
sharded over `fsdp` (GSPMD, arXiv 2105.04663).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import jax
import numpy as np
from jax import Array
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from runtimes.spmd.splash_attention import SplashAttention
from runtimes.spmd.tpu_sharding import AXES, mesh_shape, shard_axes


class Mesh:
    """Devices of all processes.

    Args:
        fsdp: number of devices that share each array.
        devices: devices of the mesh; None is all devices.

    Raises:
        Refused: `fsdp` does not divide the number of devices.
    """

    def __init__(self, fsdp: int | Literal["all"], devices: Sequence[Any] | None = None) -> None:
        devices = jax.devices() if devices is None else devices
        self.count = len(devices)
        shape = mesh_shape(self.count, fsdp)
        self.fsdp = shape[1]
        self.platform = devices[0].platform
        #: Whether programs have loops. On a CPU, XLA runs convolutions in a loop 10 to 100 times
        #: slower, and other operations by one thread.
        self.has_loops = self.platform != "cpu"
        self.local = sum(device.process_index == jax.process_index() for device in devices)
        # jax.make_mesh cannot split a physical axis of most TPUs, such as fsdp 4 on 4x4 chips.
        placed = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        self.mesh = jax.sharding.Mesh(placed, AXES, axis_types=(AxisType.Auto, AxisType.Auto))
        self.replicated = NamedSharding(self.mesh, PartitionSpec())

    def splash_attention(self) -> SplashAttention | None:
        """The attention kernel for TPUs; None for other devices."""
        return SplashAttention(self.mesh) if self.platform == "tpu" else None

    def array_sharding(self, shape: Sequence[int]) -> NamedSharding:
        """Sharding of an array of a shape along `fsdp`, see spmd/tpu_sharding.py."""
        return NamedSharding(self.mesh, PartitionSpec(*shard_axes(shape, self.fsdp)))

    def row_sharding(self, axis: int) -> NamedSharding:
        """Sharding of an array whose rows, along `axis`, are divided over all devices."""
        return NamedSharding(self.mesh, PartitionSpec(*[None] * axis, AXES))

    def shard(self, array: NDArray[Any]) -> Array:
        """Copy a full array to the devices, sharded along `fsdp`."""
        return self._distribute(array, self.array_sharding(array.shape))

    def local_rows(self, shape: Sequence[int]) -> Any:
        """Index of the rows of a full array, as `shard` shards it, that this process needs."""
        if not shape:
            return ...
        indices = self.array_sharding(shape).addressable_devices_indices_map(tuple(shape)).values()
        rows = [index[0].indices(shape[0]) for index in indices if index is not None]
        return slice(min(start for start, _, _ in rows), max(stop for _, stop, _ in rows))

    def shard_rows_of(self, shape: Sequence[int], rows: NDArray[Any]) -> Array:
        """As `shard`, from the rows `local_rows(shape)` of an array of a shape."""
        if not shape:
            return self.shard(rows)
        first = self.local_rows(shape).start

        def local(index: Any) -> NDArray[Any]:
            start, stop, _ = index[0].indices(shape[0])
            return rows[(slice(start - first, stop - first), *index[1:])]

        return jax.make_array_from_callback(tuple(shape), self.array_sharding(shape), local)

    def replicate(self, array: NDArray[Any]) -> Array:
        """Copy a full array to every device."""
        return self._distribute(array, self.replicated)

    def _distribute(self, array: NDArray[Any], spread: NamedSharding) -> Array:
        return jax.make_array_from_callback(array.shape, spread, lambda index: array[index])

    def shard_rows(self, array: NDArray[Any], axis: int = 0) -> Array:
        """Shard the array of all processes over all devices.

        Args:
            array: this process's rows along `axis`.
            axis: dimension of the rows.
        """
        return jax.make_array_from_process_local_data(self.row_sharding(axis), array)

    def shard_global_rows(self, array: NDArray[Any]) -> Array:
        """Shard the rows of an array that every process has over all devices."""
        return self._distribute(array, self.row_sharding(0))

    def fetch(self, array: Array) -> NDArray[Any]:
        """Copy a full array to the host; a collective call of all processes."""
        return np.array(self.gather(array))

    def gather(self, array: Array) -> Array:
        """The array, with all its elements on this process's devices; a collective call of all
        processes."""
        if array.is_fully_addressable or array.is_fully_replicated:
            return array
        # Two programs with collectives at the same time can wait for each other.
        return jax.block_until_ready(self._gather(array))

    @cached_property
    def _gather(self) -> Any:
        return jax.jit(lambda array: array, out_shardings=self.replicated)
