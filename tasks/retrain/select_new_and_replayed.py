"""Select the samples of a retraining: the new ones, and a replay of the champion's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from artifacts.artifact_key import KeyParts
from artifacts.hashing import digest_json
from artifacts.latent_shards import INFO
from artifacts.store import SHARDS, Artifact, Draft, Shard
from configs.settings.recipe import Recipe
from tasks.encode.latent_keys import STAGE, VERSION


def key_parts(recipe: Recipe, latents: Artifact, old: Artifact, champion: str) -> KeyParts:
    """The key of the selection, an artifact of latent shards.

    Args:
        latents: of all rows of the source.
        old: latents of the champion's rows.
        champion: digest of the champion.
    """
    inputs = {"latents": latents.digest, "old": old.digest, "champion": champion}
    return KeyParts(STAGE, VERSION, {"replay": recipe.retrain.replay}, inputs)


def build(
    recipe: Recipe, latents: Artifact, old: Artifact, champion: str, draft: Draft
) -> dict[str, Any]:
    """Add the new shards, and old ones up to the share `retrain.replay`, to the draft.

    Returns the summary: samples by group, shards, and `new` and `replayed` training samples.
    """
    known = {shard.key for shard in _shards(old)}
    shards = _shards(latents)
    new = [shard for shard in shards if shard.key not in known]
    share = recipe.retrain.replay
    wanted = _count(new) * share / (1 - share)
    replay = _sample(
        [shard for shard in shards if shard.key in known and _count([shard])], wanted, champion
    )
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


def _sample(shards: list[Shard], wanted: float, seed: str) -> list[Shard]:
    """Shards in a random order of `seed`, as many as come closest to the wanted samples."""
    chosen: list[Shard] = []
    for shard in sorted(shards, key=lambda shard: digest_json([seed, shard.key])):
        if _count(chosen) + _count([shard]) / 2 > wanted:
            break
        chosen.append(shard)
    return chosen


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
