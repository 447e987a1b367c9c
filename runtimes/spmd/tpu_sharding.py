"""Device meshes and TPU slices: sharding rules, names, topologies and peaks.

Runtimes that compile a step shard batches and arrays by these rules. A TPU generation has a peak
rate, a memory size and slice topologies. A slice's name gives generation, chips, hosts and
topology.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from configs.errors import Refused
from configs.settings.train import Train

#: Batches are sharded over both axes, parameters and optimizer state over `fsdp` only.
AXES = ("data", "fsdp")


def mesh_shape(count: int, fsdp: int | Literal["all"]) -> tuple[int, int]:
    """Shape (data, fsdp) of a mesh of `count` devices.

    Raises:
        Refused: `fsdp` does not divide `count`.
    """
    if fsdp == "all":
        return 1, count
    if count % fsdp:
        raise Refused(f"train.fsdp {fsdp} does not divide {count} devices")
    return count // fsdp, fsdp


def shard_axes(shape: Sequence[int], fsdp: int) -> tuple[str | None, ...]:
    """Mesh axis of each dimension of an array, as a PartitionSpec; None is not sharded.

    The largest dimension that `fsdp` divides is sharded, or the first of several as large. An
    array without such a dimension is replicated.
    """
    axes: list[str | None] = [None] * len(shape)
    divisible = [dim for dim, size in enumerate(shape) if size % fsdp == 0]
    if fsdp > 1 and divisible:
        axes[max(divisible, key=shape.__getitem__)] = "fsdp"
    return tuple(axes)


@dataclass(frozen=True)
class TpuSpec:
    """One TPU generation; all figures are per chip.

    The figures are from Google Cloud's pages "TPU v4", "v5e", "v5p" and "v6e". Only `hbm_bytes` is
    from the out-of-memory errors of libtpu 0.0.42: it reserves a part of the memory.
    """

    peak: float  # bfloat16 FLOP/s
    hbm_bytes: int  # available to a program
    cores: int  # TensorCores per chip, in the numbering of slice names
    shapes: tuple[tuple[int, ...], ...]  # available slice topologies, in chips


_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8))
_SQUARES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
TPU_SPECS = {
    "v4": TpuSpec(275e12, int(30.75 * 2**30), 2, _CUBES),
    "v5p": TpuSpec(459e12, int(95.74 * 2**30), 2, _CUBES),
    "v5e": TpuSpec(197e12, int(15.75 * 2**30), 1, _SQUARES),
    "v6e": TpuSpec(918e12, int(31.25 * 2**30), 1, _SQUARES),
}
#: Other names of TPU generations, in JAX (`v5 lite`) and Google Cloud (`v5litepod`).
ALIASES = {"v5 lite": "v5e", "v5litepod": "v5e", "v6 lite": "v6e", "v5": "v5p"}


def peak_of(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of a kind of TPU; None if unknown.

    Args:
        device_kind: in JAX (`TPU v5 lite`) or as Google Cloud's accelerator type (`v5litepod-16`).
    """
    name = device_kind.lower().removeprefix("tpu ").partition("-")[0]
    spec = TPU_SPECS.get(ALIASES.get(name, name))
    return None if spec is None else spec.peak


@dataclass(frozen=True)
class TpuSlice:
    """A TPU slice: chips with direct interconnect."""

    name: str  # such as v5p-8
    kind: str  # key of TPU_SPECS
    shape: tuple[int, ...]  # chips along each axis of the interconnect

    @property
    def chip(self) -> TpuSpec:
        return TPU_SPECS[self.kind]

    @property
    def chips(self) -> int:
        return prod(self.shape)

    @property
    def hosts(self) -> int:
        """Number of host machines: one per 4 chips, or one for up to 8 chips of v5e and v6e."""
        return 1 if self.kind in ("v5e", "v6e") and self.chips <= 8 else max(1, self.chips // 4)

    @property
    def topology(self) -> str:
        """The slice in libtpu's notation, such as `v5p:2x2x1`."""
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"


def parse_slice(name: str) -> TpuSlice:
    """Parse a slice name such as `v5p-8` (8 cores, 4 chips) or `v6e-8` (8 chips).

    Raises:
        Refused: the generation is unknown, or it has no slice of that size.
    """
    kind, _, size = name.partition("-")
    kind = ALIASES.get(kind, kind)
    if kind not in TPU_SPECS:
        raise Refused(f"topology {name}: no such TPU (known: {', '.join(TPU_SPECS)})")
    chip = TPU_SPECS[kind]
    sizes = {prod(shape) * chip.cores: shape for shape in chip.shapes}
    if not size.isdigit() or int(size) not in sizes:
        known = ", ".join(f"{kind}-{count}" for count in sizes)
        raise Refused(f"topology {name}: no such slice (known: {known})")
    return TpuSlice(name, kind, sizes[int(size)])


def parse_accelerator_type(name: str) -> TpuSlice | None:
    """As `parse_slice`, for Cloud TPU's accelerator types; None if the generation is unknown.

    v4 and v5p have more sizes than the topologies of TPU_SPECS, all of whole hosts; the chips of
    such a slice are in one row here.
    """
    kind, _, size = name.partition("-")
    kind = ALIASES.get(kind, kind)
    if kind not in TPU_SPECS:
        return None
    cores = int(size) if size.isdigit() else 0
    chip = TPU_SPECS[kind]
    if cores and chip.cores > 1 and cores % (4 * chip.cores) == 0:
        return TpuSlice(name, kind, (cores // chip.cores,))
    return parse_slice(name)


def check_training(where: TpuSlice, settings: Train) -> None:
    """Raise Refused for a batch or shards that the hosts or chips of a slice cannot share."""
    if settings.global_batch_size % where.hosts:
        raise Refused(
            f"train.global_batch_size {settings.global_batch_size} is not divisible by the "
            f"{where.hosts} hosts of {where.name}: make it a multiple"
        )
    mesh_shape(where.chips, settings.fsdp)


def check_rows(settings: Train, hosts: int, devices: int) -> None:
    """Raise Refused for micro-batches that the devices of each of several hosts cannot share.

    PyTorch/XLA takes equal rows of each device there; on one host it fills up a batch.

    Args:
        devices: count of a host.
    """
    share = settings.global_batch_size // hosts
    micro = settings.micro_batch(hosts)
    for rows in (micro, share % micro):
        if hosts > 1 and rows % devices:
            raise Refused(
                f"{rows} samples of a host cannot be shared by its {devices} devices: make "
                f"train.micro_batch_size a multiple of {devices}, and train.global_batch_size a "
                f"multiple of {devices * hosts}"
            )
