"""The table of sizes in docs/scale.md is the arithmetic over the rates that the documents state."""

from pathlib import Path

from bench import sizing

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_of_sizes_is_that_of_the_documents() -> None:
    """Otherwise: python -m bench.sizing prints it."""
    assert sizing.table() in (DOCS / "scale.md").read_text(encoding="utf-8")


def test_measured_rates_are_those_of_the_documents() -> None:
    scale = (DOCS / "scale.md").read_text(encoding="utf-8")
    assert f"A CPU second plans {sizing.PLANNED / 1e6} million rows" in scale
    assert f"| CPU ms per picture | {sizing.FETCHED * 1000} |" in scale
    assert f"| plan in the store, bytes per row | {sizing.PLAN_ROW} |" in scale
    assert f"1024 pixels, {sizing.LATENTS / 1e6} MB each" in scale
    assert f"| share of linear scaling | 1 | 1.00 | {sizing.SCALING} |" in scale
    benchmarks = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert f"| `sdxl_full`, batch 4: the default | {sizing.TRAINED} |" in benchmarks


def test_a_row_is_its_arithmetic() -> None:
    (row,) = (line for line in sizing.table().splitlines() if line.startswith("| 1,000,000 |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    # 1e6 / 0.44e6 s; 1e6 * 12.7 ms in hours, on 8 cores; 1e6 / 50 / 3600; 1e6 / 14.2 / 3600
    assert cells[2:8] == ["2.3 s", "3.5", "26 min", "5.6", "5.6 h", "20"]
    # 60 bytes; 0.4 * 1.3 * 1024 * 1024 + 3200 bytes; 0.58 MB; 3.53 * 0.05 + 5.56 * 3; 1,129 GB
    assert cells[8:] == ["60 MB", "0.55 TB", "0.58 TB", "$17", "$26"]
