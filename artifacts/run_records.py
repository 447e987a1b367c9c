"""What the store is needed for: what each run used, and which registries hold its models.

<store>/runs/<run>.json                what a run used
<store>/registries/<digest>.json       URL of a registry that holds models of this store
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from artifacts.commit import write_atomic
from artifacts.keys import digest_json
from artifacts.listing import entries, modified
from artifacts.store import Store

RUNS = "runs"
REGISTRIES = "registries"


class GarbageUnsure(ValueError):
    """A damaged record hides the needed artifacts; nothing may be deleted until its repair."""


def record_run(store: Store, run: str, facts: dict[str, Any]) -> None:
    """Remember what a run needs (`facts["stages"][name]["key"]`), beside what it did before."""
    path = f"{store.root}/{RUNS}/{run}.json"
    with suppress(FileNotFoundError):
        known = json.loads(store.fs.cat_file(path))
        facts = {**known, **facts, "stages": known["stages"] | facts["stages"]}
    write_atomic(store.fs, path, json.dumps(facts, indent=1).encode())


@dataclass(frozen=True)
class RunRecord:
    """What a run used."""

    path: str
    at: float  # when its last stage began, in seconds since 1970 by the store's own clock
    keys: set[tuple[str, str]]  # (stage, key) of its artifacts


def runs(store: Store) -> Iterator[RunRecord]:
    """The record of every run.

    Raises GarbageUnsure if a record is damaged, and as the filesystem does.
    """
    for entry in entries(store.fs, f"{store.root}/{RUNS}"):
        path = entry["name"]
        if path.endswith(".json"):
            try:
                stages = json.loads(store.fs.cat_file(path))["stages"]
                keys = {(stage, at["key"]) for stage, at in stages.items()}
                if not all(isinstance(key, str) for _, key in keys):
                    raise TypeError("a key is a string")
            except (AttributeError, KeyError, TypeError, ValueError):
                raise GarbageUnsure(
                    f"{path} is damaged: delete it if its run is no longer needed"
                ) from None
            yield RunRecord(path, modified(entry), keys)


def record_registry(store: Store, registry: Store) -> None:
    """Remember that a registry holds models of this store, so that their lineage is kept."""
    path = f"{store.root}/{REGISTRIES}/{digest_json(registry.url)}.json"
    if registry.url != store.url_of("registry") and not store.fs.exists(path):
        write_atomic(store.fs, path, json.dumps({"url": registry.url}).encode())


def registries(store: Store) -> Iterator[tuple[str, str]]:
    """(path of the record, URL) of every registry outside the store that holds its models."""
    for entry in entries(store.fs, f"{store.root}/{REGISTRIES}"):
        path = entry["name"]
        if path.endswith(".json"):
            try:
                yield path, str(json.loads(store.fs.cat_file(path))["url"])
            except (KeyError, TypeError, ValueError):
                raise GarbageUnsure(f"{path} is damaged: write the registry's URL again") from None
