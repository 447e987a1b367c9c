"""What of a store is needed: by recent runs, living builders and published models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from artifacts.list_folder import entries, modified, name_of, present_time
from artifacts.lock import is_dead, read_owner
from artifacts.run_records import GarbageUnsure, runs
from artifacts.store import LOCK, Artifact, Store

DAY = 86400.0
#: Name of the parent from which a training continued. Finished weights do not need it; otherwise,
#: a champion that is retrained every week would keep the weights of all those before it.
CONTINUED = "start"
Key = tuple[str, str]  # (stage, key)


@dataclass(frozen=True)
class Marks:
    """The needed artifacts."""

    artifacts: dict[Key, Artifact]  # finished
    unfinished: set[Key]  # of recent runs, which may resume them, and all of living builders
    expired: frozenset[str] = frozenset()  # paths of the records of runs that need nothing

    def __contains__(self, key: Key) -> bool:
        return key in self.artifacts or key in self.unfinished

    @property
    def busy(self) -> set[str]:
        """Stages with an unfinished artifact, which may name any shard of its stage."""
        return {stage for stage, _ in self.unfinished}


def mark(store: Store, published: Iterable[dict[str, Any]], days: float) -> Marks:
    """What runs of the last `days`, living builders and published models need.

    Args:
        published: manifests of every version in every registry.

    Raises:
        GarbageUnsure: a record is damaged, so what it needs is unknown.
    """
    now = present_time(store.fs, store.root)
    held = {key for key in store.artifact_keys() if is_held(store, key, now)}
    roots = set(held)
    expired = set()
    for run in list(runs(store)):
        if now - run.at <= days * DAY or run.keys & held:  # a run can take longer than `days`
            roots |= run.keys
        else:
            expired.add(run.path)
    for manifest in published:
        roots |= {("publish", manifest["key"]), *_parents(manifest)}
    needed = needed_by(store, roots)
    return Marks(needed, held | (roots - needed.keys()), frozenset(expired))


def needed_by(store: Store, roots: Iterable[Key]) -> dict[Key, Artifact]:
    """The artifacts of `roots` and their ancestors but CONTINUED ones, without their files.

    Raises:
        GarbageUnsure: a manifest is damaged, so its parents are unknown.
    """
    found: dict[Key, Artifact] = {}
    pending = list(roots)
    while pending:
        stage, key = pending.pop()
        if (stage, key) in found:
            continue
        try:
            artifact = store.load(stage, key, with_files=False)
        except ValueError as error:
            raise GarbageUnsure(
                f"{error}; its parents are unknown: "
                "rebuild it, or move it away if another program wrote it"
            ) from None
        if artifact is not None:
            found[stage, key] = artifact
            pending += _parents(artifact.manifest)
    return found


def is_held(store: Store, key: Key, now: float) -> bool:
    """Whether a builder holds an artifact's lock; a day without a heartbeat ends any doubt."""
    folder = f"{store.root}/{'/'.join(key)}"
    locks = [entry for entry in entries(store.fs, folder) if name_of(entry).startswith(LOCK)]
    if not any(now - modified(entry) < DAY for entry in locks):
        return False
    owner = read_owner(store.fs, f"{folder}/{LOCK}")
    return owner is not None and not is_dead(owner)


def _parents(manifest: dict[str, Any]) -> list[Key]:
    parents = manifest["run"].get("parents", {})
    return [(p["stage"], p["key"]) for name, p in parents.items() if name != CONTINUED]
