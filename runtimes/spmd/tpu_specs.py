"""TPUs by name: what a chip can do, and how many chips a slice has, laid out how."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from runtimes.contract import WrongInput


@dataclass(frozen=True)
class Chip:
    """One kind. Figures are those of Google's pages "TPU v4", "v5e", "v5p" and "v6e", but for what
    of its memory libtpu 0.0.42 leaves to a program, as it says when it refuses one."""

    peak: float  # FLOP/s in bfloat16
    hbm_bytes: int  # that a program may take
    hbm_bandwidth: float  # bytes/s
    cores: int  # that a slice's name counts for each chip
    shapes: tuple[tuple[int, ...], ...]  # of the slices there are, in chips


_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8))
_SQUARES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
CHIPS = {
    "v4": Chip(275e12, int(30.75 * 2**30), 1228e9, 2, _CUBES),
    "v5p": Chip(459e12, int(95.74 * 2**30), 2765e9, 2, _CUBES),
    "v5e": Chip(197e12, int(15.75 * 2**30), 819e9, 1, _SQUARES),
    "v6e": Chip(918e12, int(31.25 * 2**30), 1640e9, 1, _SQUARES),
}
#: What JAX calls them, where that is another name; and what Google Cloud does.
_ALIASES = {"v5 lite": "v5e", "v5litepod": "v5e", "v6 lite": "v6e", "v5": "v5p"}


@dataclass(frozen=True)
class Slice:
    """So many chips, connected in a torus."""

    name: str  # such as v5p-8
    kind: str
    shape: tuple[int, ...]

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    @property
    def chips(self) -> int:
        return prod(self.shape)

    @property
    def hosts(self) -> int:
        """Machines that the chips are in: 4 in each, up to 8 of v5e and v6e in one."""
        return 1 if self.kind in ("v5e", "v6e") and self.chips <= 8 else max(1, self.chips // 4)

    @property
    def topology(self) -> str:
        """As libtpu names it, such as v5p:2x2x1."""
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"


def parse_slice(name: str) -> Slice:
    """The slice of a name such as `v5p-8` (8 cores, 4 chips) or `v6e-8` (8 chips).

    Raises:
        WrongInput: there is no such kind or size.
    """
    kind, _, size = name.partition("-")
    kind = _ALIASES.get(kind, kind)
    if kind not in CHIPS:
        raise WrongInput(f"topology {name}: no such TPU (there are: {', '.join(CHIPS)})")
    chip = CHIPS[kind]
    sizes = {prod(shape) * chip.cores: shape for shape in chip.shapes}
    if not size.isdigit() or int(size) not in sizes:
        known = ", ".join(f"{kind}-{count}" for count in sizes)
        raise WrongInput(f"topology {name}: no such slice (there are: {known})")
    return Slice(name, kind, sizes[int(size)])


def peak_of(device_kind: str) -> float | None:
    """FLOP/s in bfloat16 of a device as JAX names its kind, such as `TPU v5 lite`."""
    name = device_kind.lower().removeprefix("tpu ")
    found = CHIPS.get(_ALIASES.get(name, name))
    return None if found is None else found.peak
