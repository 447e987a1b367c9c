"""Processor time, disk and money of data sets, by arithmetic from the rates of docs/scale.md.

`python -m bench.estimate_time_and_cost` prints the table of docs/scale.md.
"""

from __future__ import annotations

from tasks.plan.plan import AREAS, PIXEL_BYTES, SAMPLE_BYTES

#: Measured, two cores of an AMD EPYC (docs/scale.md): rows per CPU second of planning a list, and
#: CPU seconds per picture of 12 megapixels, stored with 256 pixels.
PLANNED = 0.65e6
FETCHED = 0.047
#: Measured: bytes of a row of a shard plan, and of a sample of SDXL at 1024 pixels in a latent
#: shard (`encode.flip: false`).
PLAN_ROW = 62
LATENTS = 0.58e6
#: Bytes that `encode.flip` adds: moments of 8 x 128 x 128 bf16 numbers.
MIRRORED = 8 * 128 * 128 * 2
#: Measured: rate of one H100 that trains SDXL, in pictures per second (the newest one in
#: docs/benchmarks.md), and the share of linear scaling of four encoder processes.
TRAINED = 13.0
SCALING = 0.96
#: Measured: pictures per second of one H200 that encodes SDXL at 1024 pixels in bf16: the VAE's 34
#: per second and the text encoders' 525, one after the other (docs/benchmarks.md).
ENCODED = 32
#: Assumed prices: of a core and of an accelerator for an hour, and of a GB in a bucket for a month.
CORE_HOUR = 0.05
DEVICE_HOUR = 3.0
GB_MONTH = 0.023
#: Pictures -> machines, cores and accelerators.
MACHINES = {
    10_000: ("2 cores, 1 accelerator", 2, 1),
    100_000: ("4 cores, 1 accelerator", 4, 1),
    1_000_000: ("8 cores, 1 accelerator", 8, 1),
    10_000_000: ("32 cores, 8 accelerators", 32, 8),
    100_000_000: ("8 x 16 cores, 4 x 8 accelerators", 128, 32),
    400_000_000: ("16 x 16 cores, 8 x 8 accelerators", 256, 64),
}
#: Estimated: bytes of a stored picture of 1024 pixels, as `kiln plan` does.
STORED = PIXEL_BYTES["jpg"] * AREAS["keep_ratio"] * 1024**2 + SAMPLE_BYTES
COLUMNS = [
    *("pictures", "machines", "shard plan, CPU", "download, core hours", "on these cores"),
    *("encode, device hours", "on these devices", "one epoch of SDXL, H100 hours"),
    *("shard plan", "pictures stored", "latents", "download and encode", "store, a month"),
]


def table() -> str:
    """The table, in Markdown."""
    rows = [" | ".join(COLUMNS), " | ".join(["---"] * len(COLUMNS)), *map(_row, MACHINES)]
    return "\n".join(f"| {row} |" for row in rows)


def _row(pictures: int) -> str:
    machines, cores, devices = MACHINES[pictures]
    core_hours = pictures * FETCHED / 3600
    device_hours = pictures / ENCODED / 3600 / (SCALING if devices > 1 else 1)
    sizes = [pictures * each for each in (PLAN_ROW, STORED, LATENTS)]
    cells = [
        f"{pictures:,}",
        machines,
        _time(pictures / PLANNED / 3600),
        f"{_short(core_hours)}",
        _time(core_hours / cores),
        f"{_short(device_hours)}",
        _time(device_hours / devices),
        f"{_short(pictures / TRAINED / 3600)}",
        *map(_bytes, sizes),
        f"${_short(core_hours * CORE_HOUR + device_hours * DEVICE_HOUR)}",
        f"${_short(sum(sizes) / 1e9 * GB_MONTH)}",
    ]
    return " | ".join(cells)


def _short(value: float) -> str:
    """A number with two digits, or in full above 100."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _time(hours: float) -> str:
    if hours * 3600 < 90:
        return f"{_short(hours * 3600)} s"
    return f"{_short(hours * 60)} min" if hours < 1.5 else f"{_short(hours)} h"


def _bytes(size: float) -> str:
    unit, name = next((u, n) for u, n in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")) if size >= u / 10)
    return f"{_short(size / unit)} {name}"


if __name__ == "__main__":
    print(table())
