"""Output of every benchmark: a table for people and, as the last line, one JSON object."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from configs.load_recipe import CHECKOUT

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


class Rounds:
    """Sides of a comparison in turns, each in a new folder below `folder`."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder = folder
        self.rounds = rounds

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A temporary folder."""
        with TemporaryDirectory(dir=self.folder) as folder:
            yield Path(folder)

    def alternate(self, *sides: Callable[[Path], Any]) -> list[list[Any]]:
        """Results of each side in every round. Each round starts with another side."""
        results: list[list[Any]] = [[] for _ in sides]
        for number in range(self.rounds):
            for position in range(len(sides)):
                side = (number + position) % len(sides)
                with self.scratch() as folder:
                    results[side].append(sides[side](folder))
        return results


class Meter:
    """Seconds of the wall and of this process's processor time, since it was made."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._cpu_since = time.process_time()

    def elapsed(self) -> tuple[float, float]:
        """Seconds, and CPU seconds."""
        return time.perf_counter() - self._since, time.process_time() - self._cpu_since

    def figures(self) -> dict[str, float]:
        """Rounded seconds, and the peak memory of the process."""
        seconds, cpu = self.elapsed()
        return {"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2), "peak_mib": peak_mib()}


def peak_mib() -> int:
    """Peak of this process, without what it inherited from its parent (as ru_maxrss has)."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024


def run_module(module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Any:
    """Run `python -m module` in the checkout; the JSON in the last line that it prints.

    Raises:
        CalledProcessError: its exit code is not 0.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=CHECKOUT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def option_parser(
    bench: str, description: str | None, rounds: int | None = None
) -> argparse.ArgumentParser:
    """The options of a benchmark: `--json`, and `--rounds` if there is a default."""
    made = argparse.ArgumentParser(prog=f"python -m bench.{bench}", description=description)
    made.add_argument("--json", type=Path, metavar="FILE", help="file for the JSON line")
    if rounds is not None:
        made.add_argument("--rounds", type=int, default=rounds, help="default: %(default)s")
    return made


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum over rounds."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "rounds": len(values),
    }


def machine(threads: int) -> dict[str, Any]:
    """Facts about this machine; the load average is from before the benchmark."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": threads,
        "memory_gib": round(pages / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "gpu": gpu_name(),
    }


def versions(packages: Sequence[str] = REPORTED) -> dict[str, str]:
    """Versions of these packages, as far as they are installed."""
    installed = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def attempt(name: str, make: Callable[[], Row]) -> Row:
    """A row of the table; an error becomes a failed row, so that other rows still run."""
    log(f"{name} ...")
    try:
        return make()
    except Skip as reason:
        return Row(name, skipped=str(reason))
    except Exception as error:
        traceback.print_exc()
        return Row(name, failed=f"{type(error).__name__}: {error}")


def finish(
    bench: str,
    rows: Sequence[Row],
    options: argparse.Namespace,
    packages: Sequence[str] = REPORTED,
    **facts: Any,
) -> int:
    """Publish the rows of a benchmark; its exit code, 1 if a row failed.

    Args:
        options: options of `option_parser`.
        packages: packages whose versions are reported.
        facts: further facts; `machine` replaces the facts of this machine.
    """
    shared = {"machine": machine(os.cpu_count() or 1), "versions": versions(packages)}
    publish(bench, rows, shared | facts, options.json)
    return int(any(row.failed for row in rows))


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


def gpu_name() -> str | None:
    """Name of the first CUDA device; None without CUDA."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
