"""Output of every benchmark: a table for people and, as the last line, one JSON object."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

REPORTED = ("kilnworks", "torch", "diffusers", "transformers", "accelerate", "peft", "numpy")


@dataclass
class Row:
    """A result of the table. A ratio above 1 means that ours is faster or smaller."""

    name: str
    ratios: dict[str, float] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    skipped: str = ""  # the reason; empty if it ran
    failed: str = ""  # the error; empty if there is none


class Skip(Exception):
    """A row cannot run on this machine; the message is the reason."""


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum over rounds."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "rounds": len(values),
    }


def machine(threads: int) -> dict[str, Any]:
    """Facts about this machine; the load average is that before the benchmark."""
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


def versions(packages: Sequence[str] = REPORTED) -> dict[str, str]:
    """Versions of the installed ones of these packages."""
    installed = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def publish(bench: str, rows: Sequence[Row], facts: dict[str, Any], json_file: Path | None) -> None:
    """Print the table and the JSON line. Write the line to `json_file` too, if it is given."""
    for line in table(rows):
        print(line)
    ratios = {name: round(ratio, 4) for row in rows for name, ratio in row.ratios.items()}
    figures: dict[str, Any] = {row.name: row.figures for row in rows if row.figures}
    result = {"bench": bench, **facts, "ratios": ratios, "figures": figures}
    result["skipped"] = {row.name: row.skipped for row in rows if row.skipped}
    result["failed"] = {row.name: row.failed for row in rows if row.failed}
    text = json.dumps(result)
    if json_file is not None:
        json_file.write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)


def table(rows: Sequence[Row]) -> list[str]:
    """The rows as lines of text, with the spread of figures that were measured in rounds."""
    lines = [""]
    for row in rows:
        lines.append(row.name)
        lines += [f"    skipped: {row.skipped}"] if row.skipped else []
        lines += [f"    FAILED: {row.failed}"] if row.failed else []
        lines += [f"    {name:44} {ratio:8.3f}" for name, ratio in row.ratios.items()]
        lines += [f"    {name:44} {_format(value)}" for name, value in row.figures.items()]
    return [*lines, ""]


def log(text: str) -> None:
    """Print progress on standard error, because the last line of the output is JSON."""
    print(text, file=sys.stderr, flush=True)


def _format(value: Any) -> str:
    if isinstance(value, dict) and "median" in value:
        return "{median:8.4g}   ({min:.4g} to {max:.4g})".format(**value)
    return f"{value:8.4g}" if isinstance(value, float) else f"{value:>8}"


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1] if model else platform.machine()


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
