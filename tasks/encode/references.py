"""Encoding of references: each once by its content, and the index of which target has which.

References that an earlier artifact of the same VAE and settings has are not encoded again. The
others are reference shards, one for each image shard that has some.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from artifacts.filesystems import ask_at_once
from artifacts.latent_shards import BAD_REFERENCE, LeftOut, read_ids, shard_key, to_bfloat16
from artifacts.records import digest_json
from artifacts.references import SUFFIX, Targets, encode_index, write_reference_shard
from artifacts.store import Artifact, Shard, Store
from configs.errors import Failed
from configs.settings.recipe import Recipe
from runtimes.contract import PipelineEncoder
from runtimes.pipeline_folder.folder import Base
from runtimes.sample.reference_pictures import ReferenceLimits
from tasks.encode.crop_to_bucket import STAGE, BadSample, Size, decode
from tasks.encode.encoded_once import EncodedOnce
from tasks.encode.parts import ShardPart
from tasks.pictures import Pictures, PictureShard
from tasks.reference_pairs import Pair, picture_ids, read_pairs

#: Increment when the content of a reference shard changes.
VERSION = 1
#: Batches of references that wait until one is full: references have many sizes.
WAITING = 4


@dataclass(frozen=True)
class ReferenceSettings:
    """What a reference's latents depend on, besides its bytes and the VAE."""

    pixels: int
    step: int
    max_pixels: int
    batch_size: int
    dtype: str

    @classmethod
    def of(cls, recipe: Recipe, base: Base) -> ReferenceSettings:
        encode = recipe.encode
        step = math.lcm(encode.bucket_step, base.encoders["size_step"])
        limit = recipe.download.max_pixels
        return cls(encode.reference_pixels, step, limit, encode.batch_size, encode.dtype)

    def digest(self, base: Base) -> str:
        """Of these and of the VAE."""
        return digest_json({"version": VERSION, "vae": base.digest_vae(), **asdict(self)})


class ReferencePart(NamedTuple):
    """References of an image shard that are encoded to one reference shard."""

    key: str  # of the reference shard
    pictures: PictureShard

    @property
    def request(self) -> dict[str, Any]:
        """What `encode_reference_tar` needs."""
        return {"key": self.key, "tar": self.pictures.tar, "references": asdict(self.pictures)}


#: Latent shard's key -> stored group -> sha256 of each sample's references, in order; None for a
#: sample that lacks one.
OfTargets = Mapping[str, Mapping[str, Sequence[tuple[bytes, ...] | None]]]


class Indexed(NamedTuple):
    """An index, and what it is of."""

    data: bytes
    bad: LeftOut  # the samples that lack a reference
    distinct: int  # number of references
    of_targets: OfTargets


@dataclass(frozen=True)
class EncodedReferences:
    """The references of an encode stage's targets.

    Args:
        references: of stage `references`.
        alike: `ReferenceSettings.digest`.
    """

    store: Store
    references: Artifact
    alike: str

    @cached_property
    def pairs(self) -> dict[str, list[Pair]]:
        """Key of an image shard -> its pictures in the order of the tar, and their references."""
        return read_pairs(self.references)

    @cached_property
    def wanted(self) -> set[bytes]:
        """Sha256 of all references of targets that have all of theirs."""
        pairs = (pair for of_shard in self.pairs.values() for pair in of_shard)
        return {sha256 for pair in pairs for sha256 in pair.references or ()}

    @cached_property
    def encoded(self) -> EncodedOnce:
        """The reference shards there are."""
        return EncodedOnce(self.store, SUFFIX, self.alike, self.wanted)

    @cached_property
    def parts(self) -> list[ReferencePart]:
        """The references that no shard before has, once for those with equal bytes."""
        left = set(self.encoded.missing)
        images = pictures_of(self.references)
        parts = []
        ids = {} if images is None else picture_ids(images)
        for shard in [] if images is None else Pictures(images).shards:
            mask = np.zeros(shard.samples, bool)
            for row, sha256 in enumerate(ids[shard_key(shard.path)]):
                mask[row] = sha256 in left
                left.discard(sha256)
            if mask.any():
                chosen = shard.with_rows(mask)
                about = {"references": self.alike, "tar": chosen.sha256, "rows": chosen.rows}
                parts.append(ReferencePart(digest_json(about), chosen))
        return parts

    def index(
        self, shards: Sequence[Shard], targets: Sequence[Shard], parts: Sequence[ShardPart]
    ) -> Indexed:
        """The index of the references of targets.

        Args:
            shards: all reference shards.
            targets: the latent shard of each part.
        """
        places, rows = self.encoded.table(shards)
        index: dict[str, dict[str, Targets]] = {}
        bad: LeftOut = {}
        of_targets: dict[str, dict[str, list[tuple[bytes, ...] | None]]] = {}
        read = ask_at_once(self.store.fs, self._target_ids, targets)
        for part, groups in zip(parts, read, strict=True):
            named = self._of_part(part)
            for group, ids in groups.items():
                pairs = [next(named[sha256]).references for sha256 in ids]
                whole = [own if own is None or rows.keys() >= {*own} else None for own in pairs]
                if any(whole):
                    lists = ([rows[sha256] for sha256 in own or ()] for own in whole)
                    index.setdefault(part.key, {})[group] = Targets.from_lists(lists)
                missing = {n: BAD_REFERENCE for n, own in enumerate(whole) if own is None}
                if missing:
                    bad.setdefault(part.key, {})[group] = missing
                of_targets.setdefault(part.key, {})[group] = whole
        return Indexed(encode_index(places, index), bad, len(places), of_targets)

    def _of_part(self, part: ShardPart) -> Mapping[bytes, Iterator[Pair]]:
        """Sha256 of a target -> its pairs; the rows of a picture have one order in all shards."""
        pairs = defaultdict[bytes, list[Pair]](list)
        of_tar = self.pairs.get(shard_key(part.pictures.path), [])
        for pair, is_in in zip(of_tar, part.pictures.mask, strict=True):
            if is_in:
                pairs[pair.id].append(pair)
        return {sha256: iter(rows) for sha256, rows in pairs.items()}

    def _target_ids(self, shard: Shard) -> dict[str, list[bytes]]:
        [entry] = shard.files
        return read_ids(self.store.fs, f"{self.store.shards_path(STAGE)}/{entry.path}")


def pictures_of(references: Artifact) -> Artifact | None:
    """The downloaded references; None if no picture has any. Raises Failed if they were deleted."""
    at = references.manifest["run"]["parents"].get("pictures")
    if at is None:
        return None
    images = references.store.load(at["stage"], at["key"])
    if images is None:
        raise Failed(f"{at['stage']} {at['key'][:12]}: it was deleted: run again")
    return images


class _Decoded(NamedTuple):
    position: int  # in the tar
    sha256: bytes
    pixels: NDArray[np.float32]  # [3, H, W]


def encode_reference_tar(
    encoder: PipelineEncoder,
    device: Lock,
    settings: ReferenceSettings,
    request: dict[str, Any],
    folder: str,
) -> dict[str, dict[str, Any]]:
    """Encode references of an image shard to a reference shard in `folder`.

    Args:
        device: held while the encoder runs.

    Returns key -> facts of the shard: `references` ({group: number}) and `bad_reasons`.

    Raises:
        Damaged: the tar has another sha256.
    """
    bad: Counter[str] = Counter()
    encoded: dict[int, tuple[bytes, NDArray[np.uint16]]] = {}
    with device:
        for batch in _batches(PictureShard(**request["references"]), settings, bad):
            means, _ = encoder.images(np.stack([reference.pixels for reference in batch]))
            for reference, mean in zip(batch, means, strict=True):
                if not np.isfinite(mean).all():
                    bad["NaN latent"] += 1
                    continue
                encoded[reference.position] = (reference.sha256, to_bfloat16(mean))
    path = Path(folder, f"{request['key']}{SUFFIX}")
    groups = write_reference_shard(path, (encoded[position] for position in sorted(encoded)))
    facts = {"references": groups, "bad": bad.total(), "bad_reasons": dict(sorted(bad.items()))}
    return {request["key"]: facts}


def _batches(
    pictures: PictureShard, settings: ReferenceSettings, bad: Counter[str]
) -> Iterator[list[_Decoded]]:
    """Batches of one size each; the largest is cut short once too many references wait."""
    waiting: dict[Size, list[_Decoded]] = defaultdict(list)
    for reference in _decoded(pictures, settings, bad):
        size = reference.pixels.shape[1], reference.pixels.shape[2]
        waiting[size].append(reference)
        if len(waiting[size]) == settings.batch_size:
            yield waiting.pop(size)
        elif sum(map(len, waiting.values())) == WAITING * settings.batch_size:
            yield waiting.pop(max(waiting, key=lambda s: (len(waiting[s]), s)))
    yield from (waiting[size] for size in sorted(waiting))


def _decoded(
    pictures: PictureShard, settings: ReferenceSettings, bad: Counter[str]
) -> Iterator[_Decoded]:
    limits = ReferenceLimits(settings.pixels, settings.step)
    for position, sample in enumerate(pictures.read()):
        try:
            image = decode(sample.image, settings.max_pixels)
        except BadSample as error:
            bad[str(error)] += 1
            continue
        yield _Decoded(position, sample.source_sha256, limits.prepare(image))


def count_bad(bad: LeftOut) -> int:
    """Samples that a missing reference leaves out."""
    return sum(len(rows) for groups in bad.values() for rows in groups.values())


def without(bad: LeftOut, dropped: LeftOut) -> LeftOut:
    """The samples of `bad` that are not dropped for another reason."""
    kept: LeftOut = {}
    for key, groups in bad.items():
        for group, rows in groups.items():
            others = dropped.get(key, {}).get(group, {})
            if own := {row: why for row, why in rows.items() if row not in others}:
                kept.setdefault(key, {})[group] = own
    return kept


def meta_of(shard: Shard, alike: str) -> dict[str, Any]:
    """What a manifest says of a reference shard, by which later runs find it."""
    return {"alike": alike, "references": sum(shard.meta["references"].values())}
