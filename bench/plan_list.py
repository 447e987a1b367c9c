"""Planning of a list: `python -m bench.plan_list --rows 10_000_000 [--format parquet]`.

It writes a list of made-up rows, plans it, plans it again unchanged, then with one more file. A
process of its own does each, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report import Row, log, machine, publish, versions
from configs.settings.recipe import Recipe

FILES = 4  # of the list
SHARD_SIZE = 1000  # rows
COPY = {
    "parquet": "format parquet, row_group_size 100_000",
    "csv": "format csv, header",
    "jsonl": "format json",
}


def main(arguments: Sequence[str]) -> int:
    """Measure in child processes and print the figures; 1 if the second plan read the list."""
    parser = argparse.ArgumentParser(prog="python -m bench.plan_list", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--format", choices=COPY, default="parquet")
    parser.add_argument("--folder", help="work folder; default: a temporary one")
    parser.add_argument("--plan", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.plan:
        print(json.dumps(_planned(Path(options.folder), options.format)))
        return 0
    with tempfile.TemporaryDirectory(prefix="kiln-", dir=options.folder) as scratch:
        folder = Path(scratch)
        for number in range(FILES):
            _write(folder, number, options.rows // FILES, options.format)
        log("planning the list")
        first = _child(folder, options.format)
        second = _child(folder, options.format)
        _write(folder, FILES, options.rows // 100, options.format)
        grown = _child(folder, options.format)
        store = sum(file.stat().st_size for file in folder.glob("store/**/*") if file.is_file())
    figures: dict[str, Any] = {
        "million_rows_per_second": round(options.rows / first["seconds"] / 1e6, 3),
        "million_rows_per_cpu_second": round(options.rows / first["cpu_seconds"] / 1e6, 3),
        **{f"{name}_{k}": v for name, found in _named(first, second, grown) for k, v in found},
        "store_bytes_per_row": round(store / options.rows, 1),
    }
    facts = {"machine": machine(os.cpu_count() or 1), "versions": versions(("duckdb", "pyarrow"))}
    publish("plan_list", [Row(f"{options.rows:,} {options.format}", figures=figures)], facts, None)
    return int(second["read"] > 0)


def _named(*found: dict[str, Any]) -> list[tuple[str, Any]]:
    return list(zip(("first", "unchanged", "grown"), (one.items() for one in found), strict=True))


def _write(folder: Path, number: int, rows: int, format: str) -> None:
    """One file of a list with as many columns as LAION's; DuckDB writes it itself."""
    import duckdb

    (folder / "list").mkdir(exist_ok=True)
    row = f"""
        'https://host' || i % 9973 || '.example.org/pictures/' || md5('{number} ' || i) || '.jpg'
            as url,
        'a picture of thing ' || i % 1009 || ' beside thing ' || i % 10007 || ', seen from afar'
            as caption,
        i % 4096 as width, i % 2048 as height, (i % 100) / 100.0 as similarity
    """
    file = folder / "list" / f"{number}.{format}"
    with duckdb.connect() as db:
        db.execute(f"copy (select {row} from range({rows}) t(i)) to '{file}' ({COPY[format]})")


def _child(folder: Path, format: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.plan_list", "--plan", "--folder", str(folder)]
    environment = {**os.environ, "KILN_CACHE": str(folder / "cache"), "TMPDIR": str(folder)}
    done = subprocess.run(
        [*command, "--format", format], check=True, stdout=subprocess.PIPE, env=environment
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _planned(folder: Path, format: str) -> dict[str, Any]:
    """Seconds and memory of one plan."""
    from tasks import download

    (folder / "store").mkdir(exist_ok=True)
    recipe = Recipe.model_validate(
        {
            "name": "plan-list",
            "model": {"path": "unused"},
            "store": str(folder / "store"),
            "source": {"kind": "urls", "path": str(folder / "list"), "format": format},
            "download": {"shard_size": SHARD_SIZE},
            "evaluate": {"clip": "unused", "prompts": {"all": {"prompts": ["a"]}}},
            "publish": {"name": "unused"},
        }
    )
    begun = time.time()
    since = time.perf_counter()
    cpu_since = time.process_time()
    plan = download.plan(recipe)
    seconds = time.perf_counter() - since
    cpu_seconds = time.process_time() - cpu_since
    run = plan.artifact.manifest["run"]
    is_new = Path(plan.artifact.path, "manifest.json").stat().st_mtime > begun
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "read": run["read"] if is_new else 0,  # files
        "shards": len(plan.shards),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
