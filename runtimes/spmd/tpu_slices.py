"""TPU slices by name: generation, chips, hosts and topology."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from configs.settings.train import Train
from runtimes.contract import WrongInput
from runtimes.spmd.mesh_shape_and_sharding import mesh_shape
from runtimes.spmd.tpu_specs import ALIASES, TPU_SPECS, TpuSpec


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
        WrongInput: the generation is unknown, or it has no slice of that size.
    """
    kind, _, size = name.partition("-")
    kind = ALIASES.get(kind, kind)
    if kind not in TPU_SPECS:
        raise WrongInput(f"topology {name}: no such TPU (known: {', '.join(TPU_SPECS)})")
    chip = TPU_SPECS[kind]
    sizes = {prod(shape) * chip.cores: shape for shape in chip.shapes}
    if not size.isdigit() or int(size) not in sizes:
        known = ", ".join(f"{kind}-{count}" for count in sizes)
        raise WrongInput(f"topology {name}: no such slice (known: {known})")
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
    cores, chip = int(size) if size.isdigit() else 0, TPU_SPECS[kind]
    if cores and chip.cores > 1 and cores % (4 * chip.cores) == 0:
        return TpuSlice(name, kind, (cores // chip.cores,))
    return parse_slice(name)


def check_training(where: TpuSlice, settings: Train) -> None:
    """Raise WrongInput for a batch or shards that the hosts or chips of a slice cannot share."""
    if settings.global_batch_size % where.hosts:
        raise WrongInput(
            f"train.global_batch_size {settings.global_batch_size} is not divisible by the "
            f"{where.hosts} hosts of {where.name}: make it a multiple"
        )
    mesh_shape(where.chips, settings.fsdp)


def check_rows(settings: Train, hosts: int, devices: int) -> None:
    """Raise WrongInput for micro-batches that the devices of each of several hosts cannot share.

    PyTorch/XLA takes equal rows of each device there; on one host it fills up a batch.

    Args:
        devices: count of a host.
    """
    share, micro = settings.global_batch_size // hosts, settings.micro_batch(hosts)
    for rows in (micro, share % micro):
        if hosts > 1 and rows % devices:
            raise WrongInput(
                f"{rows} samples of a host cannot be shared by its {devices} devices: make "
                f"train.micro_batch_size a multiple of {devices}, and train.global_batch_size a "
                f"multiple of {devices * hosts}"
            )
