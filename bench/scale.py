"""Time and memory by size: `python -m bench.scale list|rows|shards [--counts N ...] [--quick]`.

* `list`: a list of made-up rows is planned, planned again unchanged, then with 1% more in one file,
  then anew by `source.where` with conditions that keep all rows, and a tenth of them.
* `rows`: a list is downloaded and encoded with the demo's base. One row in 200 has a picture, which
  a loopback server sends. The addresses of all others are refused before a connection.
* `shards`: steps that read the records of all shards of an artifact. The shards are made up, and
  their files empty: a check compares size and time stamp.

Each step runs in a separate process, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from artifacts.gc import Collector, mark, record_run
from artifacts.records import FileEntry, digest_json
from artifacts.store import Artifact, KeyParts, Shard, Store
from bench import report
from bench.benchmark_inputs import BASE, list_recipe
from bench.download import photo_server
from configs.settings.recipe import Recipe

FILES = 4  # of the list
#: Step -> the condition of its plan, by which all rows or a tenth of them are kept.
NUMBER = "try_cast(similarity as double)"
WHERE = {"where_all": f"{NUMBER} >= 0", "where_tenth": f"{NUMBER} >= 0.9"}
SERVED = 200  # one row in so many has a picture
COPY = {
    "parquet": "format parquet, row_group_size 100_000",
    "csv": "format csv, header",
    "jsonl": "format json",
}
PARTS = KeyParts("download", 1, {}, {})
EMPTY = hashlib.sha256(b"").hexdigest()
SUFFIXES = (".parquet", ".tar")
WRITTEN = 10**18  # time stamp of all files in ns; workers stamp them, not the commit
FACTS = {"samples": 987, "outcomes": {"http 404": 9, "success": 987, "timeout": 4}, "retries": 0}
Step = Callable[[Path, int], dict[str, Any] | None]  # (folder, count) -> figures
Measured = Callable[[str], dict[str, Any]]  # a step's figures, by its name


def list_figures(folder: Path, rows: int, measured: Measured, format: str) -> dict[str, Any]:
    """Figures of a first plan, a second of the unchanged list, and a third of more rows."""
    for number in range(FILES):
        _write_list(folder, number, rows // FILES, format)
    plans = {"first": measured("plan"), "unchanged": measured("plan")}
    if plans["unchanged"]["read"]:
        raise RuntimeError("the plan of the unchanged list read it again")
    _write_list(folder, FILES, rows // 100, format)
    plans["grown"] = measured("plan")
    for step in WHERE:
        plans[step] = measured(step)
        plans[step]["cpu_ratio"] = round(
            plans[step]["cpu_seconds"] / plans["first"]["cpu_seconds"], 3
        )
    store = sum(file.stat().st_size for file in folder.glob("store/**/*") if file.is_file())
    rates = {
        f"million_rows_per_{name}": round(rows / plans["first"][f"{kind}seconds"] / 1e6, 3)
        for name, kind in (("second", ""), ("cpu_second", "cpu_"))
    }
    return {**rates, **_flat(plans), "store_bytes_per_row": round(store / rows, 1)}


def _flat(steps: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {f"{name}_{key}": value for name, step in steps.items() for key, value in step.items()}


def _write_list(folder: Path, number: int, rows: int, format: str) -> None:
    """One file of a list with as many columns as LAION's."""
    row = f"""
        'https://host' || i % 9973 || '.example.org/pictures/' || md5('{number} ' || i) || '.jpg'
            as url,
        'a picture of thing ' || i % 1009 || ' beside thing ' || i % 10007 || ', seen from afar'
            as caption,
        i % 4096 as width, i % 2048 as height, (i % 100) / 100.0 as similarity
    """
    _copy(folder / "list" / f"{number}.{format}", row, rows, COPY[format])


def _copy(file: Path, columns: str, rows: int, options: str = COPY["parquet"]) -> None:
    """Write a table of made-up rows by DuckDB; `i` is a row's number."""
    import duckdb

    file.parent.mkdir(parents=True, exist_ok=True)
    with duckdb.connect() as db:
        db.execute(f"copy (select {columns} from range({rows}) t(i)) to '{file}' ({options})")


def _plan(folder: Path, _: int, where: str | None = None) -> dict[str, Any]:
    from tasks import download

    files = folder / "list"
    format = next(files.iterdir()).suffix[1:]
    own = folder if where is None else folder / digest_json(where)
    begun = time.time()
    plan = download.plan(list_recipe(own, path=str(files), format=format, where=where))
    is_new = Path(plan.artifact.path, "manifest.json").stat().st_mtime > begun
    read = plan.artifact.manifest["run"]["read"] if is_new else 0  # files
    return {"read": read, "shards": len(plan.shards)}


def row_figures(folder: Path, rows: int, measured: Measured, host: str) -> dict[str, Any]:
    """Figures of the download with its plan, and of the encoding."""
    served = f"'http://{host}/small/fast/' || i || '.jpg'"
    refused = "'http://10.0.0.' || i % 256 || '/pictures/' || md5('' || i) || '.jpg'"
    columns = f"if(i % {SERVED} = 0, {served}, {refused}) as url, 'picture ' || i as caption"
    _copy(folder / "urls.parquet", columns, rows)
    (folder / "host").write_text(host)
    return _flat({name: measured(name) for name in ("download", "encode")})


def _row_recipe(folder: Path) -> Recipe:
    download = {
        "allow_hosts": [(folder / "host").read_text()],
        "max_requests_per_host": None,
        "max_failed": 1.0,
    }
    encode = {"resolution": 32, "holdout": 0.0}
    path = str(folder / "urls.parquet")
    return list_recipe(folder, path=path, download=download, encode=encode)


def _download(folder: Path, _: int) -> dict[str, Any]:
    from tasks import download

    recipe = _row_recipe(folder)
    plan = download.plan(recipe)
    planned = report.peak_mib()
    stage = download.DownloadStage(recipe, plan)
    draft = Store(recipe.store).draft(stage.parts)
    summary = stage.build(draft, lambda *_: None)
    draft.commit(summary, {})
    (folder / "images").write_text(stage.parts.key)
    return {"plan_peak_mib": planned, "pictures": summary["images"]}


def _encode(folder: Path, _: int) -> None:
    from runtimes.pipeline_folder.folder import Base
    from tasks.encode.stage import EncodeStage

    recipe = _row_recipe(folder)
    store = Store(recipe.store)
    images = store.find("download", (folder / "images").read_text())
    assert images is not None
    base = Base.open(BASE)
    stage = EncodeStage(recipe, images, base)
    draft = store.draft(stage.parts)
    draft.commit(stage.build(draft, lambda *_: None), {})


def shard_figures(folder: Path, shards: int, measured: Measured, _: str) -> dict[str, Any]:
    """Figures of the commit of an artifact, its load and check, and a garbage collection."""
    _write_files(Store(str(folder)), shards)
    names = ("commit", "load", "verify", "gc_mark", "gc_collect")
    return _flat({name: measured(name) for name in names})


def _keys(shards: int) -> list[str]:
    return [hashlib.sha256(str(number).encode()).hexdigest() for number in range(shards)]


def _write_files(store: Store, shards: int) -> None:
    """Empty files of shards, without records: preparation, and no step of a run."""
    folder = Path(store.shards_path("download"))
    folder.mkdir(parents=True)
    for key in _keys(shards):
        for suffix in SUFFIXES:
            file = folder / f"{key}.{EMPTY}{suffix}"
            file.touch()
            os.utime(file, ns=(WRITTEN, WRITTEN))


def _commit(folder: Path, shards: int) -> dict[str, Any]:
    """The artifact's draft and manifest, as at the end of the download stage."""
    store = Store(str(folder))
    draft = store.draft(PARTS)
    for key in _keys(shards):
        names = [f"{key}.{EMPTY}{suffix}" for suffix in SUFFIXES]
        files = [FileEntry(name, 0, EMPTY, {}, f"mtime:{WRITTEN}") for name in names]
        draft.add_shard(Shard(key, files, FACTS))
    made = draft.commit({"shards": shards}, {})
    record_run(store, "run", {"stages": {"download": [made.key]}})
    return {"manifest_mib": Path(made.path, "manifest.json").stat().st_size >> 20}


def _load(folder: Path, shards: int) -> None:
    artifact: Artifact | None = Store(str(folder)).load("download", PARTS.key)
    assert artifact is not None and len(artifact.files) == len(SUFFIXES) * shards


def _verify(folder: Path, _: int) -> None:
    """Load, and compare all sizes and stamps, as a reuse does."""
    assert Store(str(folder)).find("download", PARTS.key) is not None


def _mark(folder: Path, _: int) -> None:
    assert ("download", PARTS.key) in mark(Store(str(folder)), [], 30)


def _collect(folder: Path, _: int) -> None:
    """List the store and find its garbage; all shards are needed."""
    store = Store(str(folder))
    assert not list(Collector(store, lambda: mark(store, [], 30), days=30, min_age=0).garbage())


STEPS: dict[str, Step] = {
    **{step: partial(_plan, where=where) for step, where in WHERE.items()},
    **{"plan": _plan, "download": _download, "encode": _encode},
    **{"commit": _commit, "load": _load, "verify": _verify},
    **{"gc_mark": _mark, "gc_collect": _collect},
}
#: Step -> the module that it imports before the clock starts.
IMPORTED = {
    **dict.fromkeys(["plan", "download", *WHERE], "tasks.download"),
    "encode": "tasks.encode.stage",
}
#: What -> its figures, default counts, and those of `--quick`. Figures take the folder, the
#: count, the steps' measurement, and the format of a list or the host of pictures.
SCENARIOS: dict[str, tuple[Callable[..., dict[str, Any]], Sequence[int], Sequence[int]]] = {
    "list": (list_figures, (1_000_000,), (10_000,)),
    "rows": (row_figures, (1_000, 100_000, 1_000_000), (400, 1_000)),
    "shards": (shard_figures, (40_000, 400_000), (100, 1_000)),
}


def main(arguments: Sequence[str]) -> int:
    """Measure each count; the steps in child processes."""
    parser = report.option_parser("scale", __doc__)
    parser.add_argument("what", choices=SCENARIOS)
    parser.add_argument("--counts", type=int, nargs="+", help="of rows or shards")
    parser.add_argument("--quick", action="store_true", help="few")
    parser.add_argument("--format", choices=COPY, default="parquet", help="of a list")
    parser.add_argument("--folder", help="work folder; default: a temporary one")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.step:
        if options.step in IMPORTED:
            import_module(IMPORTED[options.step])
        meter = report.Meter()
        extra = STEPS[options.step](Path(options.folder), *options.counts)
        print(json.dumps({**meter.figures(), **(extra or {})}))
        return 0
    packages = ("kilnworks", "duckdb", "pyarrow", "aiohttp", "fsspec")
    return report.finish("scale", list(_rows(options)), options, packages)


def _rows(options: argparse.Namespace) -> Iterator[report.Row]:
    what = options.what
    figures, full, quick = SCENARIOS[what]
    with tempfile.TemporaryDirectory(prefix="kiln-", dir=options.folder) as scratch:
        server = photo_server(Path(scratch), is_quick=options.quick)
        with server if what == "rows" else nullcontext(options.format) as place:
            for count in options.counts or (quick if options.quick else full):
                folder = Path(scratch, str(count))
                folder.mkdir()
                measured = figures(folder, count, _child(folder, count), place)
                yield report.Row(f"{count:,} {what}", figures=measured)


def _child(folder: Path, count: int) -> Measured:
    environment = {"KILN_CACHE": str(folder / "cache"), "TMPDIR": str(folder)}

    def measured(step: str) -> dict[str, Any]:
        report.log(f"{count:,}: {step}")
        words = ("list", "--step", step, "--folder", str(folder), "--counts", str(count))
        return dict(report.run_module("bench.scale", *words, environment=environment))

    return measured


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
