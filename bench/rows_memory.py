"""Memory of the first stages by the number of rows: `python -m bench.rows_memory [--rows N ...]`.

One row in 200 has a picture, which a loopback server sends. The addresses of all others are refused
before a connection, so a million rows take minutes. A process plans and downloads, another encodes
with the demo's base: each is the flow and its worker, as in the default runner.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.benchmark_inputs import BASE
from bench.download import photo_server
from bench.report import Row, log, machine, publish, versions
from configs.settings.recipe import Recipe

SIZES = (1_000, 100_000, 1_000_000)  # rows
SERVED = 200  # one row in so many has a picture
SHARD_SIZE = 1000  # rows


def main(arguments: Sequence[str]) -> int:
    """Measure each size in a child process."""
    parser = argparse.ArgumentParser(prog="python -m bench.rows_memory", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=SIZES)
    parser.add_argument("--quick", action="store_true", help="400 and 1,000 rows")
    parser.add_argument("--json", type=Path, help="file for the JSON line")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        stage, folder = options.measure
        print(json.dumps(STAGES[stage](Path(folder))))
        return 0
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="kiln-bench-") as scratch,
        photo_server(Path(scratch), is_quick=options.quick) as host,
    ):
        for count in (400, 1_000) if options.quick else options.rows:
            log(f"{count:,} rows")
            folder = Path(scratch, str(count))
            _write_list(folder, count, host)
            figures = {k: v for stage in STAGES for k, v in _child(stage, folder).items()}
            rows.append(Row(f"{count:,} rows", figures=figures))
    facts = {
        "machine": machine(os.cpu_count() or 1),
        "versions": versions(("kilnworks", "duckdb", "pyarrow", "aiohttp")),
    }
    publish("rows_memory", rows, facts, options.json)
    return 0


def _child(stage: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.rows_memory", "--measure", stage, str(folder)]
    environment = {**os.environ, "KILN_CACHE": str(folder / "cache"), "TMPDIR": str(folder)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _write_list(folder: Path, count: int, host: str) -> None:
    import duckdb

    folder.mkdir()
    (folder / "host").write_text(host)
    served = f"'http://{host}/small/fast/' || i || '.jpg'"
    refused = "'http://10.0.0.' || i % 256 || '/pictures/' || md5('' || i) || '.jpg'"
    rows = f"select if(i % {SERVED} = 0, {served}, {refused}) as url, 'picture ' || i as caption"
    with duckdb.connect() as db:
        db.execute(f"copy ({rows} from range({count}) t(i)) to '{folder}/urls.parquet'")


def _recipe(folder: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "rows-memory",
            "model": {"path": str(BASE)},
            "store": str(folder / "store"),
            "source": {"kind": "urls", "path": str(folder / "urls.parquet")},
            "download": {
                "allow_hosts": [(folder / "host").read_text()],
                "max_requests_per_host": None,
                "max_failed": 1.0,
                "shard_size": SHARD_SIZE,
            },
            "encode": {"resolution": 32, "holdout": 0.0},
            "evaluate": {"clip": "unused", "prompts": {"all": {"prompts": ["a"]}}},
            "publish": {"name": "unused"},
        }
    )


def _download(folder: Path) -> dict[str, Any]:
    """Peak memory (MiB) after the plan and after the download, and seconds of both."""
    from artifacts.store import Store
    from tasks import download

    (folder / "store").mkdir()
    recipe = _recipe(folder)
    begun = time.perf_counter()
    cpu_begun = time.process_time()
    plan = download.plan(recipe)
    store = Store(recipe.store)
    planned = _peak_mib()
    stage = download.DownloadStage(recipe, plan)
    parts = stage.parts
    draft = store.draft(parts)
    summary = stage.build(draft, lambda *_: None)
    draft.commit(summary, {})
    (folder / "images").write_text(parts.key)
    return {
        "plan_peak_mib": planned,
        "download_peak_mib": _peak_mib(),
        "seconds": round(time.perf_counter() - begun, 1),
        "cpu_seconds": round(time.process_time() - cpu_begun, 1),
        "pictures": summary["images"],
    }


def _encode(folder: Path) -> dict[str, Any]:
    """Peak memory (MiB) of the encoding of the downloaded pictures, and its seconds."""
    from artifacts.store import Store
    from runtimes.pipeline_folder.folder import Base
    from tasks.encode.stage import EncodeStage

    recipe = _recipe(folder)
    store = Store(recipe.store)
    begun = time.perf_counter()
    cpu_begun = time.process_time()
    images = store.find("download", (folder / "images").read_text())
    assert images is not None
    base = Base.open(BASE)
    stage = EncodeStage(recipe, images, base)
    draft = store.draft(stage.parts)
    draft.commit(stage.build(draft, lambda *_: None), {})
    return {
        "encode_peak_mib": _peak_mib(),
        "encode_seconds": round(time.perf_counter() - begun, 1),
        "encode_cpu_seconds": round(time.process_time() - cpu_begun, 1),
    }


STAGES = {"download": _download, "encode": _encode}


def _peak_mib() -> int:
    """Peak of this process, without what it inherited from its parent (as ru_maxrss has)."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
