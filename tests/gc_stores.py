"""Small stores with runs, and collections of their garbage."""

import os
import tempfile
from pathlib import Path
from typing import Any

from artifacts.gc import Collector, Marks, mark, needed_by, record_run
from artifacts.store import Artifact, KeyParts, Store

DAY = 86400.0


def make(store: Store, stage: str, n: int, **parents: Artifact) -> Artifact:
    draft = store.draft(KeyParts(stage, 1, {"n": n}, {k: a.digest for k, a in parents.items()}))
    draft.write("data", f"{stage} {n}".encode())
    with tempfile.NamedTemporaryFile() as source:
        source.write(b"x" * n)
        source.flush()
        draft.add_shard(store.commit_shard(stage, f"shard{n}", {".tar": source.name}, {}))
    known = {name: {"stage": a.stage, "key": a.key} for name, a in parents.items()}
    return draft.commit({}, {"parents": known})


def use(store: Store, run: str, *artifacts: Artifact) -> None:
    """What a run does before it looks for an artifact."""
    record_run(store, run, {"stages": {a.stage: [a.key] for a in artifacts}})


def collector(store: Store, *needed: Artifact, days: float = 30, min_age: float = 0) -> Collector:
    def marked() -> Marks:
        found = mark(store, [], days)
        return Marks(
            found.artifacts | needed_by(store, [(a.stage, a.key) for a in needed]),
            found.unfinished,
            found.expired,
        )

    return Collector(store, marked, days=days, min_age=min_age)


def kinds(items: Any) -> list[tuple[str, str]]:
    return sorted((item.stage, item.kind) for item in items)


def age(store: Store, seconds: float, path: str = "") -> None:
    """Make everything in a local store, or a folder or a file of it, older."""
    top = Path(store.root, path)
    for file in [top] if top.is_file() else top.rglob("*"):
        at = file.lstat().st_mtime - seconds
        os.utime(file, (at, at), follow_symlinks=False)
