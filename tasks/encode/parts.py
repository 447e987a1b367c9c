"""Which pictures of an image shard a latent shard has.

Without a selection, it has all of them. With one, newly chosen pictures of an image shard are a
latent shard of their own, beside those of earlier runs. What those have and the selection lacks is
left out, row by row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from typing import Any

from artifacts.filesystems import ask_at_once
from artifacts.latent_shards import NOT_SELECTED, HeldOut, LeftOut, read_ids, shard_key
from artifacts.store import Artifact, KeyParts, Shard, Store
from tasks.build_or_reuse import recent_artifacts
from tasks.encode.crop_to_bucket import STAGE
from tasks.pictures import Pictures, PictureShard


@dataclass(frozen=True)
class ShardPart:
    """Pictures of an image shard, and the latent shard that has them."""

    key: str  # of the latent shard
    pictures: PictureShard
    captioner: str | None  # digest of what their captions are from; None: the source

    @property
    def facts(self) -> dict[str, Any]:
        """What a manifest says of it, so that a later run opens no shard."""
        return {
            "tar": self.pictures.sha256,
            "rows": self.pictures.rows,
            "captioner": self.captioner,
        }


NewPart = Callable[[PictureShard], ShardPart]


def parts_of(store: Store, pictures: Pictures, stage: KeyParts, new: NewPart) -> list[ShardPart]:
    """The parts of all image shards, once for those with equal bytes.

    Args:
        stage: that of the encode artifact.
        new: returns the part with the pictures of its argument.
    """
    shards = {shard.sha256: shard for shard in pictures.shards}
    if pictures.selected is None:
        return [new(shard) for shard in shards.values()]
    before = _encoded_before(store, stage, shards, new)
    parts = []
    for sha256, shard in shards.items():
        wanted = shard.mask
        for part in before.get(sha256, ()):
            encoded = part.pictures.mask
            if (shard.mask & encoded).any():
                parts.append(part)
                wanted &= ~encoded
        if wanted.any():
            parts.append(new(shard.with_rows(wanted)))
    return parts


def _encoded_before(
    store: Store, stage: KeyParts, shards: Mapping[str, PictureShard], new: NewPart
) -> dict[str, list[ShardPart]]:
    """Sha256 of an image shard -> its parts in the newest artifact that has some.

    No picture is in two of them. An image shard that was encoded without a selection has one part.
    """
    missing = {sha256: new(replace(shard, rows=None)) for sha256, shard in shards.items()}
    encoded: dict[str, list[ShardPart]] = {}
    for artifact in _encoded_alike(store, stage):
        found = defaultdict[str, list[ShardPart]](list)
        for entry in artifact.files:
            whole = missing.get(entry.meta.get("tar", ""))
            if whole is not None and whole.captioner == entry.meta["captioner"]:
                pictures = replace(whole.pictures, rows=entry.meta["rows"])
                part = replace(whole, key=shard_key(entry.path), pictures=pictures)
                found[whole.pictures.sha256].append(part)
        encoded |= found
        missing = {sha256: whole for sha256, whole in missing.items() if sha256 not in found}
        if not missing:
            break
    wholes = [*missing.values()]
    there = store.committed_shards(stage.stage, [whole.key for whole in wholes])
    of_all = zip(wholes, there, strict=True)
    return encoded | {whole.pictures.sha256: [whole] for whole, shard in of_all if shard}


def _encoded_alike(store: Store, stage: KeyParts) -> Iterator[Artifact]:
    """Recent artifacts of the same encoders and settings, the newest first."""
    for recent in recent_artifacts(store, stage.stage):
        if recent is None or recent.manifest["settings"] != stage.settings:
            continue
        artifact = store.load(stage.stage, recent.key)
        if artifact and artifact.manifest["inputs"].get("encoders") == stage.inputs["encoders"]:
            yield artifact


def not_selected(
    store: Store, pictures: Pictures, parts: Sequence[ShardPart], shards: Sequence[Shard]
) -> LeftOut:
    """The samples of latent shards whose pictures are not selected.

    Args:
        shards: the latent shard of each part.
    """

    def find(number: int) -> dict[str, dict[int, str]]:
        part = parts[number].pictures
        kept = pictures.kept(part)
        if not (part.mask & ~kept).any():
            return {}
        # A picture may be in several rows, which come in the same order in the latent shard.
        is_kept = defaultdict[bytes, list[bool]](list)
        ids = zip(pictures.ids(part), part.mask, kept, strict=True)
        for sha256, is_in, stays in ids:
            if is_in:
                is_kept[sha256].append(bool(stays))
        turns = {sha256: iter(flags) for sha256, flags in is_kept.items()}
        [entry] = shards[number].files
        groups = read_ids(store.fs, f"{store.shards_path(STAGE)}/{entry.path}")
        dropped = {
            group: {row: NOT_SELECTED for row, i in enumerate(of_group) if not next(turns[i])}
            for group, of_group in groups.items()
        }
        return {group: rows for group, rows in dropped.items() if rows}

    if pictures.selected is None:
        return {}
    found = ask_at_once(store.fs, find, range(len(parts)))
    return {part.key: groups for part, groups in zip(parts, found, strict=True) if groups}


def held_out_order(store: Store, shards: Sequence[Shard], dropped: LeftOut) -> HeldOut:
    """The held-out samples of latent shards by their pictures' sha256.

    Args:
        dropped: samples that are not selected.
    """

    def find(shard: Shard) -> list[tuple[bytes, str, str, int]]:
        [entry] = shard.files
        groups = read_ids(store.fs, f"{store.shards_path(STAGE)}/{entry.path}", "holdout/")
        out = dropped.get(shard.key, {})
        return [
            (sha256, shard.key, group, row)
            for group, ids in groups.items()
            for row, sha256 in enumerate(ids)
            if row not in out.get(group, {})
        ]

    found = ask_at_once(store.fs, find, shards)
    by_id = sorted(chain.from_iterable(found), key=itemgetter(0))
    return [(key, group, row) for _, key, group, row in by_id]
