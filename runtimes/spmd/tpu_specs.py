"""Specifications of TPU generations, and topologies of TPU slices."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from runtimes.contract import WrongInput


@dataclass(frozen=True)
class TpuSpec:
    """One TPU generation; all figures are per chip.

    The figures are from Google Cloud's pages "TPU v4", "v5e", "v5p" and "v6e". Only `hbm_bytes` is
    from the out-of-memory errors of libtpu 0.0.42: it reserves a part of the memory.
    """

    peak: float  # bfloat16 FLOP/s
    hbm_bytes: int  # available to a program
    hbm_bandwidth: float  # bytes/s
    cores: int  # TensorCores per chip, in the numbering of slice names
    shapes: tuple[tuple[int, ...], ...]  # available slice topologies, in chips


_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8))
_SQUARES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
TPU_SPECS = {
    "v4": TpuSpec(275e12, int(30.75 * 2**30), 1228e9, 2, _CUBES),
    "v5p": TpuSpec(459e12, int(95.74 * 2**30), 2765e9, 2, _CUBES),
    "v5e": TpuSpec(197e12, int(15.75 * 2**30), 819e9, 1, _SQUARES),
    "v6e": TpuSpec(918e12, int(31.25 * 2**30), 1640e9, 1, _SQUARES),
}
#: Other names of TPU generations, in JAX (`v5 lite`) and Google Cloud (`v5litepod`).
_ALIASES = {"v5 lite": "v5e", "v5litepod": "v5e", "v6 lite": "v6e", "v5": "v5p"}


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
    kind = _ALIASES.get(kind, kind)
    if kind not in TPU_SPECS:
        raise WrongInput(f"topology {name}: no such TPU (known: {', '.join(TPU_SPECS)})")
    chip = TPU_SPECS[kind]
    sizes = {prod(shape) * chip.cores: shape for shape in chip.shapes}
    if not size.isdigit() or int(size) not in sizes:
        known = ", ".join(f"{kind}-{count}" for count in sizes)
        raise WrongInput(f"topology {name}: no such slice (known: {known})")
    return TpuSlice(name, kind, sizes[int(size)])


def peak_of(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of a kind of TPU; None if unknown.

    Args:
        device_kind: in JAX (`TPU v5 lite`) or as Google Cloud's accelerator type (`v5litepod-16`).
    """
    name = device_kind.lower().removeprefix("tpu ").partition("-")[0]
    found = TPU_SPECS.get(_ALIASES.get(name, name))
    return None if found is None else found.peak
