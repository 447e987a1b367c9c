"""The mesh of devices: how batches and arrays are spread over it.

It has two axes. All devices share a batch; those along `fsdp` share every array as well, so that
weights, moments and average take a part of the memory on each (GSPMD, arXiv 2105.04663).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax import Array
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from runtimes.data.padding import padded_rows
from runtimes.spmd.sharding import AXES, mesh_shape, shard_axes


class Mesh:
    """Devices of all processes.

    Args:
        fsdp: how many share each array.
        devices: all there are, if None.

    Raises:
        WrongInput: `fsdp` does not divide the number of devices.
    """

    def __init__(self, fsdp: int | Literal["all"], devices: Sequence[Any] | None = None) -> None:
        devices = jax.devices() if devices is None else devices
        self.count = len(devices)
        shape = mesh_shape(self.count, fsdp)
        self.fsdp = shape[1]
        self.platform = devices[0].platform
        self.local = sum(device.process_index == jax.process_index() for device in devices)
        # Not jax.make_mesh, which splits no physical axis of most TPUs: four of a 4x4, say.
        placed = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        self.mesh = jax.sharding.Mesh(placed, AXES, axis_types=(AxisType.Auto, AxisType.Auto))
        self.replicated = NamedSharding(self.mesh, PartitionSpec())

    def array_sharding(self, shape: Sequence[int]) -> NamedSharding:
        """How an array of that shape is cut."""
        return NamedSharding(self.mesh, PartitionSpec(*shard_axes(shape, self.fsdp)))

    def row_sharding(self, axis: int) -> NamedSharding:
        """An array whose rows, along `axis`, are shared by all devices."""
        return NamedSharding(self.mesh, PartitionSpec(*[None] * axis, AXES))

    def padded_rows(self, count: int) -> int:
        """Rows that this process must give for so many, so that all its devices have as many."""
        return padded_rows(count, self.local)

    def shard(self, array: NDArray[Any]) -> Array:
        """A whole array on the devices, each taking its part."""
        return self._put(array, self.array_sharding(array.shape))

    def replicate(self, array: NDArray[Any]) -> Array:
        """A whole array on every device."""
        return self._put(array, self.replicated)

    def _put(self, array: NDArray[Any], spread: NamedSharding) -> Array:
        return jax.make_array_from_callback(array.shape, spread, lambda index: array[index])

    def shard_rows(self, array: NDArray[Any], axis: int = 0) -> Array:
        """This process's rows of an array, along `axis`, on its devices."""
        return jax.make_array_from_process_local_data(self.row_sharding(axis), array)

    def shard_global_rows(self, array: NDArray[Any]) -> Array:
        """An array that every process has, its rows shared by all devices."""
        return self._put(array, self.row_sharding(0))

    def fetch(self, array: Array) -> NDArray[Any]:
        """A copy of a whole array, put together from its parts. Every process calls it alike."""
        if array.is_fully_addressable:
            return np.array(array)
        return np.array(multihost_utils.process_allgather(array, tiled=True))
