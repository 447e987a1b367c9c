"""Select the samples of a retraining: the new ones, and a replay of the champion's."""

from __future__ import annotations

import json
import logging
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from artifacts.latent_shards import INFO, ShardRef
from artifacts.records import digest_json
from artifacts.store import SHARDS, Artifact, Draft, KeyParts, Shard
from configs.settings.recipe import Recipe
from tasks.encode.latent_keys import STAGE, VERSION
from tasks.retrain.cut_shard import cut_shard

#: Increment when other samples are selected, or when a cut shard has other content.
SELECTION = 2
log = logging.getLogger("kiln")


def key_parts(recipe: Recipe, latents: Artifact, old: Artifact, champion: str) -> KeyParts:
    """The key of the selection, an artifact of latent shards.

    Args:
        latents: of all rows of the source.
        old: latents of the champion's rows.
        champion: digest of the champion.
    """
    inputs = {"latents": latents.digest, "old": old.digest, "champion": champion}
    settings = {"replay": recipe.retrain.replay, "selection": SELECTION}
    return KeyParts(STAGE, VERSION, settings, inputs)


def build(
    recipe: Recipe, latents: Artifact, old: Artifact, champion: str, draft: Draft
) -> dict[str, Any]:
    """Add the new shards, and old samples up to the share `retrain.replay`, to the draft.

    The old ones are whole shards, and a part of one more, without its held-out samples.

    Returns the summary: samples by group, shards, and `new` and `replayed` training samples.
    """
    known = {shard.key for shard in _shards(old)}
    shards = _shards(latents)
    new = [shard for shard in shards if shard.key not in known]
    unchanged = [shard for shard in shards if shard.key in known and _count([shard])]
    wanted = _wanted(_count(new), recipe.retrain.replay)
    replay, rest = _sample(unchanged, wanted, champion)
    if rest is not None:
        replay.append(_cut(recipe, latents, rest, wanted - _count(replay), champion, draft))
    if (replayed := _count(replay)) < wanted:
        message = "retrain: replay %s: of %s old samples, the champion's unchanged shards have %s"
        log.warning(message, recipe.retrain.replay, f"{wanted:,}", f"{replayed:,}")
    for shard in (chosen := [*new, *replay]):
        draft.add_shard(shard)
    draft.write(INFO, latents.read(INFO))
    groups: Counter[str] = Counter()
    for shard in chosen:
        groups.update(shard.meta["groups"])
    return {
        "samples": groups.total(),
        "groups": dict(sorted(groups.items())),
        "shards": len(chosen),
        "new": _count(new),
        "replayed": _count(replay),
    }


def new_samples(latents: Artifact, old: Artifact) -> int:
    """Number of training samples in the shards that the champion's latents lack."""
    known = {shard.key for shard in _shards(old)}
    return _count([shard for shard in _shards(latents) if shard.key not in known])


def _wanted(new: int, share: float) -> int:
    """Old samples, of which `share` of all are; one at least, unless the share is 0."""
    return max(1, round(new * share / (1 - share))) if share else 0


def _sample(shards: Sequence[Shard], wanted: int, seed: str) -> tuple[list[Shard], Shard | None]:
    """Whole shards in a random order of `seed`, and the next one if a part of it is wanted."""
    chosen: list[Shard] = []
    for shard in sorted(shards, key=lambda shard: digest_json([seed, shard.key])):
        missing = wanted - _count(chosen)
        if _count([shard]) > missing:
            return chosen, shard if missing else None
        chosen.append(shard)
    return chosen, None


def _cut(
    recipe: Recipe, latents: Artifact, shard: Shard, count: int, seed: str, draft: Draft
) -> Shard:
    """A shard of `count` training samples of another."""
    [entry] = shard.files
    url = latents.url(f"../{SHARDS}/{entry.path}")
    ref = ShardRef(url, entry.size, entry.sha256, shard.meta["groups"])
    info, cache_bytes = json.loads(latents.read(INFO)), recipe.train.cache_bytes
    with tempfile.TemporaryDirectory(prefix="kiln-replay-") as folder:
        path = Path(folder, "shard.safetensors")
        groups = cut_shard(ref, info, count, seed, path, cache_bytes=cache_bytes)
        key = digest_json({"cut": entry.sha256, "samples": count, "seed": seed, "of": SELECTION})
        files = {".safetensors": str(path)}
        return draft.store.commit_shard(STAGE, key, files, {"groups": groups})


def _count(shards: list[Shard]) -> int:
    """Training samples; mirrored copies do not count."""
    groups = (shard.meta["groups"] for shard in shards)
    return sum(n for group in groups for name, n in group.items() if name.startswith("train/"))


def _shards(latents: Artifact) -> list[Shard]:
    """The latent shards of an artifact, in the order of their names."""
    prefix = f"../{SHARDS}/"
    entries = [entry for entry in latents.files if entry.path.startswith(prefix)]
    named = [replace(entry, path=entry.path.removeprefix(prefix)) for entry in entries]
    return [Shard(entry.path.partition(".")[0], [entry], entry.meta) for entry in named]
