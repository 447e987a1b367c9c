"""Peak rate, memory and slice topologies of each TPU generation."""

from __future__ import annotations

from dataclasses import dataclass


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
    found = TPU_SPECS.get(ALIASES.get(name, name))
    return None if found is None else found.peak
