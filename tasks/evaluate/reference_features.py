"""Features of held-out and training pictures, stored by content and reused by later evaluations."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from artifacts.image_shards import Sample
from artifacts.records import digest_json, open_checked
from artifacts.store import Shard, Store
from tasks.evaluate.draw_pictures import STAGE
from tasks.evaluate.feature_encoders import BATCH, Float32, ImageEncoder, Picture, batches

VERSION = 1
Split = Literal["holdout", "train"]


@dataclass(frozen=True)
class ReferenceFeatures:
    """The features of one encoder, and which pictures they are of."""

    features: Float32  # [M, D]
    pictures: tuple[tuple[str, str], ...]  # (path of the tar in the images artifact, sample key)
    shard: Shard


@dataclass(frozen=True)
class FeatureExtractor:
    """An image encoder and the sha256 or name that identifies it."""

    digest: str
    model: ImageEncoder


def reference_features(
    store: Store,
    encoders: Mapping[str, FeatureExtractor],
    facts: Mapping[str, Any],
    pictures: Iterable[tuple[str, Sample, Picture]],
    tell: Callable[[int], None] = lambda done: None,
) -> dict[str, ReferenceFeatures]:
    """Features by each encoder, in the order of the pictures.

    Stored ones are reused; one pass over the pictures computes the others.

    Args:
        facts: all that selects and transforms the pictures, for the key.
        pictures: (path of the tar, sample, transformed picture), read only if features are missing.
        tell: called after each batch, with the number of pictures so far.
    """
    keys = {
        name: digest_json({"features": VERSION, "encoder": one.digest, **facts})
        for name, one in encoders.items()
    }
    shards = {name: store.shard(STAGE, key) for name, key in keys.items()}
    missing = {name: encoders[name].model for name, shard in shards.items() if shard is None}
    if missing:
        named, computed = _compute(missing, pictures, tell)
        shards |= {name: _commit(store, keys[name], one, named) for name, one in computed.items()}
    return {name: _read(store, shard) for name, shard in shards.items() if shard is not None}


def _compute(
    models: Mapping[str, ImageEncoder],
    pictures: Iterable[tuple[str, Sample, Picture]],
    tell: Callable[[int], None],
) -> tuple[list[tuple[str, str]], dict[str, Float32]]:
    """The name of each picture, and its features [M, D] by each model."""
    rows: dict[str, list[Float32]] = {name: [] for name in models}
    names: list[tuple[str, str]] = []
    for batch in batches(pictures, BATCH):
        names += [(path, sample.key) for path, sample, _ in batch]
        for name, model in models.items():
            rows[name].append(model.images([picture for *_, picture in batch]))
        tell(len(names))
    none = [np.zeros((0, 0), np.float32)]
    return names, {name: np.concatenate(found or none) for name, found in rows.items()}


def _commit(store: Store, key: str, features: Float32, pictures: list[tuple[str, str]]) -> Shard:
    with tempfile.TemporaryDirectory(prefix="kiln-features-") as folder:
        path = Path(folder) / "features.safetensors"
        metadata = {"pictures": json.dumps(pictures)}
        save_file({"features": np.ascontiguousarray(features)}, path, metadata)
        local = {".safetensors": str(path)}
        return store.commit_shard(STAGE, key, local, {"features": len(features)})


def _read(store: Store, shard: Shard) -> ReferenceFeatures:
    (entry,) = shard.files
    url = store.shard_url(STAGE, entry.path)
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as local:
        with open_checked(url, entry.sha256) as stream:
            while block := stream.read(2**20):
                local.write(block)
        local.flush()
        with safe_open(local.name, framework="numpy") as tensors:
            pictures = json.loads(tensors.metadata()["pictures"])
            features = tensors.get_tensor("features")
    return ReferenceFeatures(features, tuple((path, key) for path, key in pictures), shard)
