"""An artifact of many shards: `python -m bench.many_shards [--shards 400_000] [--quick]`.

It writes the records of made-up shards to a store, then measures each step that reads all of them:
commit, load, check of the stamps, marking for garbage collection, and the collection. A process of
its own does each step, so that its peak memory is its own. No shard has bytes on disk; their files
are empty, and a check compares size and time stamp.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from artifacts.gc import Collector, mark, record_run
from artifacts.records import FileEntry
from artifacts.store import Artifact, KeyParts, Shard, Store
from bench.report import Row, log, machine, publish, versions

PARTS = KeyParts("download", 1, {}, {})
EMPTY = hashlib.sha256(b"").hexdigest()
SUFFIXES = (".parquet", ".tar")
WRITTEN = 10**18  # time stamp of all files in ns; workers stamp them, not the commit
FACTS = {"samples": 987, "outcomes": {"http 404": 9, "success": 987, "timeout": 4}, "retries": 0}


def main(arguments: Sequence[str]) -> int:
    """Measure each step for a tenth of the shards and for all of them."""
    parser = argparse.ArgumentParser(prog="python -m bench.many_shards", description=__doc__)
    parser.add_argument("--shards", type=int, default=400_000)
    parser.add_argument("--folder", help="work folder; default: a temporary one")
    parser.add_argument("--quick", action="store_true", help="1,000 shards")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also write the last line to this file")
    options = parser.parse_args(arguments)
    if options.step:
        print(json.dumps(_measured(options.step, Store(options.folder), options.shards)))
        return 0
    most = 1000 if options.quick else options.shards
    rows = []
    for shards in (most // 10, most):
        with tempfile.TemporaryDirectory(prefix="kiln-", dir=options.folder) as folder:
            figures: dict[str, Any] = {}
            for step in STEPS:
                log(f"{shards:,} shards: {step}")
                figures |= {f"{step}_{k}": v for k, v in _child(step, folder, shards).items()}
        rows.append(Row(f"{shards:,} shards", figures=figures))
    facts = {"machine": machine(os.cpu_count() or 1), "versions": versions(("fsspec",))}
    publish("many_shards", rows, facts, options.json)
    return 0


def _child(step: str, folder: str, shards: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.many_shards", "--step", step, "--folder", folder]
    done = subprocess.run([*command, "--shards", str(shards)], check=True, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _measured(step: str, store: Store, shards: int) -> dict[str, Any]:
    since = time.perf_counter()
    cpu_since = time.process_time()
    extra = STEPS[step](store, shards) or {}
    return {
        "seconds": round(time.perf_counter() - since, 2),
        "cpu_seconds": round(time.process_time() - cpu_since, 2),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        **extra,
    }


def _keys(shards: int) -> list[str]:
    return [hashlib.sha256(str(number).encode()).hexdigest() for number in range(shards)]


def _files(store: Store, shards: int) -> None:
    """Empty files of shards, without records: preparation, and no step of a run."""
    folder = Path(store.shards_path("download"))
    folder.mkdir(parents=True)
    for key in _keys(shards):
        for suffix in SUFFIXES:
            file = folder / f"{key}.{EMPTY}{suffix}"
            file.touch()
            os.utime(file, ns=(WRITTEN, WRITTEN))


def _commit(store: Store, shards: int) -> dict[str, Any]:
    """The artifact's draft and manifest, as at the end of the download stage."""
    draft = store.draft(PARTS)
    for key in _keys(shards):
        names = [f"{key}.{EMPTY}{suffix}" for suffix in SUFFIXES]
        files = [FileEntry(name, 0, EMPTY, {}, f"mtime:{WRITTEN}") for name in names]
        draft.add_shard(Shard(key, files, FACTS))
    made = draft.commit({"shards": shards}, {})
    record_run(store, "run", {"stages": {"download": [made.key]}})
    return {"manifest_mib": Path(made.path, "manifest.json").stat().st_size >> 20}


def _load(store: Store, shards: int) -> None:
    assert len(_loaded(store).files) == len(SUFFIXES) * shards


def _loaded(store: Store) -> Artifact:
    found = store.load("download", PARTS.key)
    assert found is not None
    return found


def _verify(store: Store, _: int) -> None:
    """Load, and compare all sizes and stamps, as a reuse does."""
    assert store.find("download", PARTS.key) is not None


def _mark(store: Store, _: int) -> None:
    assert ("download", PARTS.key) in mark(store, [], 30)


def _collect(store: Store, _: int) -> None:
    """List the store and find its garbage; all shards are needed."""
    assert not list(Collector(store, lambda: mark(store, [], 30), days=30, min_age=0).garbage())


#: Step -> its function of (store, shards); a run calls them in this order.
STEPS: dict[str, Callable[[Store, int], dict[str, Any] | None]] = {
    "files": _files,
    "commit": _commit,
    "load": _load,
    "verify": _verify,
    "gc_mark": _mark,
    "gc_collect": _collect,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
