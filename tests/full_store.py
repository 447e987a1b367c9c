"""Fill a local store with what many other runs leave: artifacts, shards, run records, versions."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

from artifacts.records import digest_json, encode_record, read_record
from artifacts.store import MANIFEST, SHARDS, Artifact, Store
from configs.settings.recipe import STAGES


def fill(root: Path, artifacts: int) -> None:
    """Add artifacts to a store with those of one run, until it has as many.

    Each is a copy of an artifact's manifest under another key, without files. Five artifacts come
    with five shards' records, a run's record, and a version of the run's model.
    """
    store = Store(str(root))
    present = list(store.artifacts())
    of_stages = [artifact for artifact in present if artifact.stage in STAGES]
    missing = max(0, artifacts - len(present))
    for number, artifact in enumerate(islice(_repeated(of_stages), missing), len(present)):
        key = digest_json([artifact.key, number])
        _write(root / artifact.stage / key / MANIFEST, {**artifact.manifest, "key": key})
        _write(root / artifact.stage / SHARDS / f"{key}.json", {"format": 2, "files": []})
        if artifact.stage == STAGES[-1]:
            stages = {stage: [digest_json([stage, number])] for stage in STAGES}
            _write(root / "runs" / f"{uuid.uuid4()}.json", {"stages": stages})
            _add_version(root / "registry", key)


def _repeated(artifacts: list[Artifact]) -> Iterator[Artifact]:
    return (artifact for _ in count() for artifact in artifacts)


def _add_version(registry: Path, key: str) -> None:
    """Add a version beside v1 of the registry's model, with another key."""
    (first,) = registry.glob(f"*/v1/{MANIFEST}")
    model = first.parents[1]
    manifest = read_record(Store(str(registry)).fs, str(first))
    number = sum(1 for _ in model.glob("v*")) + 1
    _write(model / f"v{number}" / MANIFEST, {**(manifest or {}), "key": key})


def _write(path: Path, record: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_record(record))
