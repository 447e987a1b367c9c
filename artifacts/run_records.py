"""What the store is needed for: what each run used, and which registries hold its models.

<store>/runs/<run>.json                what a run used
<store>/registries/<digest>.json       URL of a registry that holds models of this store
<store>/gc.lock                        held while `kiln gc` deletes
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import yaml

from artifacts.checksummed_files import encode_record, read_record, write_record
from artifacts.compare_and_swap import read, swap
from artifacts.concurrent_requests import ask_at_once
from artifacts.hashing import digest_json
from artifacts.list_folder import entries, modified
from artifacts.lock import owner_in_words, wait_until_free
from artifacts.store import Store

RUNS = "runs"
REGISTRIES = "registries"
COLLECTION = "gc.lock"
log = logging.getLogger("kiln")


class GarbageUnsure(ValueError):
    """A damaged record hides the needed artifacts; nothing may be deleted until its repair."""


def record_run(store: Store, run: str, facts: dict[str, Any]) -> None:
    """Remember the artifacts that a run needs, beside those that it needed before.

    Args:
        facts: of the run; `stages` has a list of keys per stage.

    A collection that did not see the record has ended when this returns: what the run then finds in
    the store stays.

    Raises GarbageUnsure if its record is damaged, and as the filesystem does.
    """
    path, recorded = f"{store.root}/{RUNS}/{run}.json", False
    while not recorded:
        known = _read(store, path)
        if known is not None:
            facts = {**known, **facts, "stages": _united(known["stages"], facts["stages"])}
        _write(store, path, facts)
        wait_until_free(store.fs, f"{store.root}/{COLLECTION}", _log_collection)
        # An expired record was garbage until then.
        recorded = read_record(store.fs, path) is not None


def _united(known: dict[str, list[str]], more: dict[str, list[str]]) -> dict[str, list[str]]:
    """Keys per stage, of both."""
    merged = {stage: known.get(stage, []) + keys for stage, keys in more.items()}
    return known | {stage: list(dict.fromkeys(keys)) for stage, keys in merged.items()}


def _write(store: Store, path: str, facts: dict[str, Any]) -> None:
    if store.is_local:
        write_record(store.fs, path, facts)
        return
    data = encode_record(facts)
    while not swap(store.fs, path, read(store.fs, path), data):
        pass  # an earlier request of ours arrived late


def _log_collection(owner: dict[str, Any]) -> None:
    log.info("`kiln gc` deletes files (%s); waiting", owner_in_words(owner))


@dataclass(frozen=True)
class RunRecord:
    """What a run used."""

    path: str
    at: float  # when its last stage began, in seconds since 1970 by the store's own clock
    keys: set[tuple[str, str]]  # (stage, key) of its artifacts
    recipe: str | None = None  # name; a run of `generate` has none
    model: str | None = None  # which a run of `generate` drew with


def runs(store: Store) -> Iterator[RunRecord]:
    """The record of every run.

    Raises GarbageUnsure if a record is damaged, and as the filesystem does.
    """
    listed = entries(store.fs, f"{store.root}/{RUNS}")
    found = {one["name"]: one for one in listed if one["name"].endswith(".json")}
    records = ask_at_once(store.fs, partial(_read, store), found)
    for (path, entry), record in zip(found.items(), records, strict=True):
        if record is not None:
            keys = {(stage, key) for stage, keys in record["stages"].items() for key in keys}
            model = record.get("model")
            yield RunRecord(path, modified(entry), keys, _recipe_name(record), model)


def _recipe_name(record: dict[str, Any]) -> str | None:
    """`name` in a record's dump of the recipe; the rest, which is long, is not parsed."""
    named = re.search(r"^name:.*(?:\n(?: .*)?$)*", str(record.get("recipe", "")), re.MULTILINE)
    return None if named is None else _parsed_name(named[0])


@cache  # of thousands of records of a few recipes
def _parsed_name(line: str) -> str:
    return str(yaml.safe_load(line)["name"])


def _read(store: Store, path: str) -> dict[str, Any] | None:
    try:
        record = read_record(store.fs, path)
        for keys in record["stages"].values() if record else ():
            if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
                raise TypeError("the keys of a stage are a list of strings")
    except (AttributeError, KeyError, TypeError, ValueError):
        raise GarbageUnsure(
            f"{path} is damaged: delete it if its run is no longer needed"
        ) from None
    return record


def record_registry(store: Store, registry: Store) -> None:
    """Remember that a registry holds models of this store, so that their lineage is kept."""
    path = f"{store.root}/{REGISTRIES}/{digest_json(registry.url)}.json"
    if registry.url != store.url_of("registry") and not store.fs.exists(path):
        write_record(store.fs, path, {"url": registry.url})


def registries(store: Store) -> Iterator[tuple[str, str]]:
    """(path of the record, URL) of every registry outside the store that holds its models."""
    for entry in entries(store.fs, f"{store.root}/{REGISTRIES}"):
        path = entry["name"]
        if path.endswith(".json"):
            try:
                record = read_record(store.fs, path)
                url = None if record is None else str(record["url"])
            except (KeyError, ValueError):
                raise GarbageUnsure(f"{path} is damaged: write the registry's URL again") from None
            if url is not None:
                yield path, url
