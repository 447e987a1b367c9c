"""What every benchmark prints: a table for people and, as the last line, one JSON object."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("kilnworks", "torch", "diffusers", "transformers", "accelerate", "peft", "numpy")


@dataclass
class Row:
    """One line of the table: ratios above 1 mean that we are better."""

    name: str
    ratios: dict[str, float] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    left_out: str = ""  # why it was not run
    failed: str = ""  # what went wrong


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most of the rounds."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "rounds": len(values),
    }


def machine(threads: int) -> dict[str, Any]:
    """What the figures were taken on; the load average is that of before."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": threads,
        "memory_gib": round(pages / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "gpu": _gpu(),
    }


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of those packages that are installed here."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def publish(bench: str, rows: Sequence[Row], facts: dict[str, Any], json_file: Path | None) -> None:
    """Print the table and the JSON line; write the latter to a file too if one is named."""
    for line in table(rows):
        print(line)
    ratios = {name: round(ratio, 4) for row in rows for name, ratio in row.ratios.items()}
    figures: dict[str, Any] = {row.name: row.figures for row in rows if row.figures}
    whole = {"bench": bench, **facts, "ratios": ratios, "figures": figures}
    for word in ("left_out", "failed"):
        whole[word] = {row.name: getattr(row, word) for row in rows if getattr(row, word)}
    text = json.dumps(whole)
    if json_file is not None:
        json_file.write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)


def table(rows: Sequence[Row]) -> list[str]:
    """The rows in words, one a line, with the spread of what was taken in rounds."""
    lines = [""]
    for row in rows:
        lines.append(row.name)
        lines += [f"    left out: {row.left_out}"] if row.left_out else []
        lines += [f"    FAILED: {row.failed}"] if row.failed else []
        lines += [f"    {name:44} {ratio:8.3f}" for name, ratio in row.ratios.items()]
        lines += [f"    {name:44} {_shown(value)}" for name, value in row.figures.items()]
    return [*lines, ""]


def say(text: str) -> None:
    """Tell how far it is: on standard error, so that the last line of the output stays JSON."""
    print(text, file=sys.stderr, flush=True)


def _shown(value: Any) -> str:
    if isinstance(value, dict) and "median" in value:
        return "{median:8.4g}   ({min:.4g} to {max:.4g})".format(**value)
    return f"{value:8.4g}" if isinstance(value, float) else f"{value:>8}"


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
