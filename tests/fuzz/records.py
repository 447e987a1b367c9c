"""Records: manifests, records of shards, checkpoints. One changed byte, and it is not accepted."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from fuzz.mutations import mutate, mutate_tree
from fuzz.reader import Reader

from artifacts.records import encode_record
from artifacts.store import KeyParts, Store
from configs.errors import Failed
from runtimes.train.checkpoints import Checkpoint, Checkpoints

KEY = "ab" * 32


def readers(folder: Path) -> list[Reader]:
    store = Store(str(folder / "store"))
    draft = store.draft(KeyParts("train", 1, {"steps": 3, "name": "é"}, {"latents": "0" * 64}))
    local = folder / "shard"
    local.write_bytes(b"bytes of a shard")
    draft.add_shard(store.commit_shard("train", KEY, {".bin": str(local)}, {"groups": {"a": 1}}))
    draft.write("weights.bin", b"weights", kind="f32")
    made = draft.commit({"samples": 3, "loss": 0.25}, {"id": "r"})
    manifest, record = Path(made.path, "manifest.json"), Path(store.shards_path("train"))
    record = record / f"{KEY}.json"

    def read_manifest(rng: Random) -> bool:
        """Bytes of a committed manifest, changed: damaged, unless they are the same bytes."""

        def read() -> bool:
            try:
                return store.load("train", made.key) is not None
            except (ValueError, Failed):
                return False

        return _with_changed_bytes(manifest, rng, read)

    def read_forged(rng: Random) -> bool:
        """A manifest that another program wrote: its seal is right, its content is anything."""

        def read() -> bool:
            try:
                found = store.find("train", made.key)
            except Failed:
                return False
            for entry in found.files if found else ():
                path = Path(made.path, entry.path).resolve()
                assert path.is_relative_to(Path(store.root, "train")), "it names a file outside"
                assert path.stat().st_size == entry.size
            return found is not None and bool(found.digest) and found.summary is not None

        return _with_forged(manifest, rng, read)

    def read_shard(rng: Random) -> bool:
        def read() -> bool:
            try:
                return store.shard("train", KEY) is not None
            except Failed:
                return False

        change = _with_changed_bytes if rng.randrange(2) else _with_forged
        return change(record, rng, read)

    return [
        Reader("manifest", 10, read_manifest),
        Reader("manifest, forged", 6, read_forged),
        Reader("shard record", 6, read_shard),
        *_of_checkpoints(folder),
    ]


def _of_checkpoints(folder: Path) -> list[Reader]:
    checkpoints = Checkpoints(str(folder), keep=2)
    arrays = {"a.bias": np.ones(3, np.float32), "b.weight": np.eye(4, dtype=np.float32)}
    state = {"weights": arrays, "ema": arrays}
    checkpoints.save(7, state, ['{"step": 1}', '{"loss": 0.5}'], {"seed": 1, "train": {}})
    place = folder / "checkpoints" / "step-00000007"
    files = sorted(place.iterdir())
    whole = checkpoints.read(7)

    def same(found: Checkpoint) -> bool:
        np.testing.assert_equal(found.state, state)
        return (found.history, found.facts) == (whole.history, whole.facts)

    def newest(rng: Random) -> bool:
        file = rng.choice(files)

        def read() -> bool:
            found = checkpoints.latest()
            assert found is None or same(found), "a changed checkpoint was resumed from"
            return found is not None

        return _with_changed_bytes(file, rng, read)

    def unverified(rng: Random) -> bool:
        """Damage that a checksum would find, where none is asked for."""
        file = rng.choice(files)

        def read() -> bool:
            try:
                found = checkpoints.read(7)
                arrays = [array[...] for group in found.state.values() for array in group.values()]
            except (ValueError, OSError, KeyError, TypeError):
                return False
            return all(array.dtype == np.float32 for array in arrays)

        change = _with_forged if file.name == "manifest.json" else _with_other_bytes
        return change(file, rng, read)

    return [Reader("checkpoint", 7, newest), Reader("checkpoint, unverified", 5, unverified)]


def _with_changed_bytes(file: Path, rng: Random, read: Any) -> bool:
    """Read a file with other bytes: only what is equal may be accepted."""
    before = file.read_bytes()
    data = mutate(before, rng)
    accepted = _with_bytes(file, before, data, read)
    assert not accepted or data == before, "other bytes were accepted"
    return accepted


def _with_other_bytes(file: Path, rng: Random, read: Any) -> bool:
    before = file.read_bytes()
    return _with_bytes(file, before, mutate(before, rng), read)


def _with_forged(file: Path, rng: Random, read: Any) -> bool:
    """Read a record with other content, sealed as `write_record` seals it."""
    before = file.read_bytes()
    content = mutate_tree(json.loads(before), rng)
    try:
        content.pop("sha256", None)
        data = encode_record(content)
    except (AttributeError, TypeError, ValueError):
        return False  # JSON cannot say it, so no record does
    return _with_bytes(file, before, data, read)


def _with_bytes(file: Path, before: bytes, data: bytes, read: Any) -> bool:
    file.write_bytes(data)
    try:
        return bool(read())
    finally:
        file.write_bytes(before)
