"""The table of sizes in docs/large-lists.md is the arithmetic over rates that documents state."""

import math
import re
from pathlib import Path

import pytest

from tasks.plan.plan import AREAS, PIXEL_BYTES, SAMPLE_BYTES

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "large-lists.md").read_text(encoding="utf-8")
#: Hours and bytes of the table's units.
UNITS = {"s": 1 / 3600, "min": 1 / 60, "h": 1, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def number(pattern: str) -> float:
    """The number that the page has at one place."""
    (text,) = re.findall(pattern, PAGE)
    return float(text.replace(",", ""))


PLANNED = number(r"\| planning a list \| ([\d.]+) M rows") * 1e6  # rows per CPU second
FETCHED = number(r"\| download \| ([\d.]+) CPU ms") / 1000  # CPU seconds per picture
ENCODED = number(r"\| encoding \| ([\d.]+) pictures")  # pictures per second
SCALING = number(r"one accelerator \| ([\d.]+) of")
TRAINED = number(r"\| training \| ([\d.]+) pictures")  # pictures per second
PLAN_ROW = number(r"\| shard plan \| (\d+) bytes per row")
LATENTS = number(r"\| latents and embeddings \| ([\d.]+) MB") * 1e6
STORED = PIXEL_BYTES["jpg"] * AREAS["keep_ratio"] * 1024**2 + SAMPLE_BYTES
CORE_HOUR, DEVICE_HOUR, GB_MONTH = (
    number(rf"\| prices \|.*\$([\d.]+) per {unit}")
    for unit in ("core hour", "accelerator hour", "GB and month")
)
ROWS = re.findall(r"^\| ([\d,]+) \| ([^|]*cores, [^|]*accelerators?) \| (.*) \|$", PAGE, re.M)


def value(cell: str) -> float:
    """Hours, bytes, dollars or hours without a unit."""
    digits, unit = re.fullmatch(r"\$?([\d.,]+) ?(\w*)", cell).groups()  # type: ignore[union-attr]
    return float(digits.replace(",", "")) * UNITS.get(unit, 1)


@pytest.mark.parametrize(("size", "machines", "cells"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_is_its_arithmetic(size: str, machines: str, cells: str) -> None:
    """Its numbers have two digits."""
    pictures = int(size.replace(",", ""))
    cores, devices = (
        math.prod(map(int, re.findall(r"\d+", part))) for part in machines.split(", ")
    )
    core_hours = pictures * FETCHED / 3600
    device_hours = pictures / ENCODED / 3600 / (SCALING if devices > 1 else 1)
    sizes = [pictures * each for each in (PLAN_ROW, STORED, LATENTS)]
    hours = [pictures / PLANNED / 3600, core_hours, core_hours / cores, device_hours]
    hours += [device_hours / devices, pictures / TRAINED / 3600]
    prices = [core_hours * CORE_HOUR + device_hours * DEVICE_HOUR, sum(sizes) / 1e9 * GB_MONTH]
    expected = [*hours, *sizes, *prices]
    assert [value(cell) for cell in cells.split(" | ")] == pytest.approx(expected, rel=0.05)


def test_the_table_has_sizes_from_ten_thousand_to_400_million() -> None:
    assert [row[0] for row in ROWS][:: len(ROWS) - 1] == ["10,000", "400,000,000"]


def test_rates_are_those_of_the_measurements() -> None:
    measured = (DOCS / "benchmarks-data.md").read_text(encoding="utf-8")
    assert f"A CPU second plans {PLANNED / 1e6} million rows" in measured
    assert f"| CPU ms per picture | {FETCHED * 1000:.0f} (" in measured
    assert f"| shard plan in the store, bytes per row | {PLAN_ROW:.0f} |" in measured
    assert f"1024 pixels, {LATENTS / 1e6} MB each" in measured
    assert f"| share of linear scaling | 1 | 1.00 | {SCALING} |" in measured
    assert f"a sample then has {(LATENTS + 2 * 8 * 128 * 128) / 1e6:.2f} MB" in PAGE
    rates = _rates_of_sdxl()
    assert rates[max(rates)] == TRAINED


def _rates_of_sdxl() -> dict[str, float]:
    """Images per second of `sdxl_full`, batch 4, on the H100, by date."""
    lines = (DOCS / "benchmarks.md").read_text(encoding="utf-8").splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("| `sdxl_full`, batch 4 |"))
    rates = {}
    for line in lines[first:]:
        name, _, rate, *_, date = (cell.strip() for cell in line.strip("|").split("|"))
        if line != lines[first] and name != "the same":
            break
        rates[date] = float(rate)
    return rates


def test_the_network_of_128_cores_has_the_rate_of_the_table() -> None:
    assert number(r"128 cores fetch ([\d,]+)") == round(128 / FETCHED)
    assert number(r"which is (\d+) Gbit/s") == round(128 / FETCHED * 4e6 * 8 / 1e9)
