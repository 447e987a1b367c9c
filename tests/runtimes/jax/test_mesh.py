"""The rows of an array that a process reads, where several processes share it."""

from typing import Any

import chips
import numpy as np
import pytest

jax = chips.importorskip("jax")
from runtimes.jax.mesh import Mesh  # noqa: E402


class SecondProcess(Mesh):
    """Two devices of four, which share the rows of an array."""

    def __init__(self) -> None: ...

    def array_sharding(self, shape: Any) -> Any:
        return self

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict[int, Any]:
        rest = (slice(None),) * (len(shape) - 1)
        size = shape[0] // 4
        return {n: (slice(n * size, (n + 1) * size), *rest) for n in (2, 3)}


def test_a_process_reads_the_rows_of_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, whole = SecondProcess(), np.arange(24).reshape(8, 3)
    rows = mesh.local_rows(whole.shape)
    assert rows == slice(4, 8)

    def by_device(shape: Any, sharding: Any, data: Any) -> list[Any]:
        return [data(index) for index in sharding.addressable_devices_indices_map(shape).values()]

    monkeypatch.setattr(jax, "make_array_from_callback", by_device)
    found: Any = mesh.shard_rows_of(whole.shape, whole[rows])
    np.testing.assert_equal(found, [whole[4:6], whole[6:8]])


def test_a_process_with_all_devices_reads_whole_arrays() -> None:
    mesh = Mesh(1, jax.devices()[:1])
    for array in (np.arange(12, dtype=np.float32).reshape(4, 3), np.float32(7)):
        rows = array[mesh.local_rows(np.shape(array))]
        np.testing.assert_equal(np.asarray(mesh.shard_rows_of(np.shape(array), rows)), array)
