"""The table of sizes in docs/scale.md is the arithmetic over the rates that the documents state."""

import re
from pathlib import Path

from bench import estimate_time_and_cost as estimate

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_of_sizes_is_that_of_the_documents() -> None:
    """Otherwise: python -m bench.estimate_time_and_cost prints it."""
    assert estimate.table() in (DOCS / "scale.md").read_text(encoding="utf-8")


def test_measured_rates_are_those_of_the_documents() -> None:
    scale = (DOCS / "scale.md").read_text(encoding="utf-8")
    assert f"A CPU second plans {estimate.PLANNED / 1e6} million rows" in scale
    assert f"| CPU ms per picture | {estimate.FETCHED * 1000:.0f} (" in scale
    assert f"| shard plan in the store, bytes per row | {estimate.PLAN_ROW} |" in scale
    assert f"1024 pixels, {estimate.LATENTS / 1e6} MB each" in scale
    assert f"| share of linear scaling | 1 | 1.00 | {estimate.SCALING} |" in scale
    with_flip = (estimate.LATENTS + estimate.MIRRORED) / 1e6
    assert f"a sample then has {with_flip:.2f} MB" in scale
    rates = _rates_of_sdxl()
    assert rates[max(rates)] == estimate.TRAINED


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


def test_a_row_is_its_arithmetic() -> None:
    (row,) = (line for line in estimate.table().splitlines() if line.startswith("| 1,000,000 |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    # 1e6 / 0.44e6 s; 1e6 * 47 ms in hours, on 8 cores; 1e6 / 32 / 3600; 1e6 / 13.0 / 3600
    assert cells[2:8] == ["1.5 s", "13", "1.6 h", "8.7", "8.7 h", "21"]
    # 62 bytes; 0.4 * 1.3 * 1024 * 1024 + 3200 bytes; 0.58 MB; 13.1 * 0.05 + 8.68 * 3; 1,129 GB
    assert cells[8:] == ["62 MB", "0.55 TB", "0.58 TB", "$27", "$26"]


def test_formulas_have_the_rates_of_the_table() -> None:
    scale = (DOCS / "scale.md").read_text(encoding="utf-8")

    def number(pattern: str) -> float:
        (found,) = re.findall(pattern, scale)
        return float(found.replace(",", ""))

    for pattern in r"\| download \| ([\d.]+) CPU ms", r"Download\*\* = pictures . ([\d.]+) ms":
        assert number(pattern) == estimate.FETCHED * 1000
    for pattern in r"\| encoding \| ([\d.]+) pictures", r"Encode\*\* = pictures ÷ ([\d.]+) per":
        assert number(pattern) == estimate.ENCODED
    for pattern in r"one accelerator \| ([\d.]+) of", r"one accelerator, the rate is . ([\d.]+):":
        assert number(pattern) == estimate.SCALING
    assert number(r"128 cores at this rate fetch ([\d,]+)") == round(128 / estimate.FETCHED)
    assert number(r"which is (\d+) Gbit/s") == round(128 / estimate.FETCHED * 4e6 * 8 / 1e9)
    prices = estimate.CORE_HOUR, estimate.DEVICE_HOUR, estimate.GB_MONTH
    words = "${} per core hour, ${:.0f} per accelerator hour, ${} per GB and month"
    assert words.format(*prices) in scale
