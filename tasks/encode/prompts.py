"""Encoding of prompts that see references: each pair of a caption and references once.

Latent shards of such a family have captions as text. Their embeddings [T, D] are in prompt shards,
as [1, T, D], in groups `<T>x<D>` of the format of reference shards. The index of an artifact names
those of each target: its captions', in order, then the empty caption's with the same references,
which replaces a dropped caption.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from artifacts.filesystems import ask_at_once
from artifacts.latent_shards import BAD_REFERENCE, LeftOut, read_captions, shard_key, to_bfloat16
from artifacts.records import digest_json
from artifacts.references import PROMPT_SUFFIX, Targets, encode_index, write_reference_shard
from artifacts.store import Artifact, Shard, Store
from configs.settings.recipe import Recipe
from runtimes.contract import PipelineEncoder
from runtimes.families import family_named
from runtimes.pipeline_folder.folder import Base
from tasks.encode.crop_to_bucket import STAGE, BadSample, decode
from tasks.encode.encoded_once import EncodedOnce
from tasks.encode.references import OfTargets
from tasks.pictures import Pictures, PictureShard
from tasks.reference_pairs import picture_ids

#: Increment when the content of a prompt shard changes.
VERSION = 1
#: Most prompts of a shard: their embeddings are in memory until it is written.
SHARD_SIZE = 512


class Prompt(NamedTuple):
    """A caption, and the references that the text encoder sees beside it."""

    caption: str
    references: tuple[bytes, ...]  # sha256 of each

    @property
    def id(self) -> bytes:
        """sha256 of both."""
        facts = [self.caption, [sha256.hex() for sha256 in self.references]]
        return hashlib.sha256(json.dumps(facts).encode()).digest()


@dataclass(frozen=True)
class PromptSettings:
    """What a prompt's embeddings depend on, besides the prompt and the text encoder."""

    max_pixels: int
    dtype: str
    text_precision: str | None

    @classmethod
    def of(cls, recipe: Recipe) -> PromptSettings:
        encode = recipe.encode
        return cls(recipe.download.max_pixels, encode.dtype, encode.text_precision)

    def digest(self, base: Base) -> str:
        """Of these and of the text encoder."""
        return digest_json({"version": VERSION, "text": base.digest_texts(), **asdict(self)})


class PromptPart(NamedTuple):
    """Prompts that are encoded to one prompt shard, and the pictures that they see."""

    key: str  # of the prompt shard
    prompts: tuple[Prompt, ...]
    pictures: list[PictureShard]
    tar: str  # a URL below the store of the pictures

    @property
    def request(self) -> dict[str, Any]:
        """What `encode_prompts` needs."""
        prompts = [[p.caption, [sha256.hex() for sha256 in p.references]] for p in self.prompts]
        pictures = [asdict(shard) for shard in self.pictures]
        return {"key": self.key, "tar": self.tar, "prompts": prompts, "pictures": pictures}


@dataclass(frozen=True)
class EncodedPrompts:
    """The prompts of an encode stage's targets.

    Args:
        pictures: the downloaded references; None: no target has any.
        alike: `PromptSettings.digest`.
        targets: the latent shards.
        references: those of each sample.
    """

    store: Store
    pictures: Artifact | None
    alike: str
    targets: Sequence[Shard]
    references: OfTargets

    @cached_property
    def of_samples(self) -> dict[str, dict[str, list[list[Prompt]]]]:
        """Latent shard's key -> stored group -> the prompts of each sample."""

        def read(shard: Shard) -> dict[str, list[list[Prompt]]]:
            [entry] = shard.files
            path = f"{self.store.shards_path(STAGE)}/{entry.path}"
            captions, groups = read_captions(self.store.fs, path)
            named = self.references.get(shard.key, {})
            prompts: dict[str, list[list[Prompt]]] = {}
            for group, samples in groups.items():
                of_group = named.get(group) or [()] * len(samples)
                prompts[group] = [
                    [Prompt(captions[row], seen) for row in (*rows, 0)] if seen is not None else []
                    for rows, seen in zip(samples, of_group, strict=True)
                ]
            return prompts

        read_shards = ask_at_once(self.store.fs, read, self.targets)
        return {s.key: groups for s, groups in zip(self.targets, read_shards, strict=True)}

    @cached_property
    def wanted(self) -> dict[bytes, Prompt]:
        """The distinct prompts by their ids, in the order of the targets."""
        samples = (
            sample
            for groups in self.of_samples.values()
            for of_group in groups.values()
            for sample in of_group
        )
        return {prompt.id: prompt for sample in samples for prompt in sample}

    @cached_property
    def encoded(self) -> EncodedOnce:
        """The prompt shards there are."""
        return EncodedOnce(self.store, PROMPT_SUFFIX, self.alike, self.wanted.keys())

    @cached_property
    def parts(self) -> list[PromptPart]:
        """The prompts that no shard before has."""
        missing = self.encoded.missing
        new = [prompt for sha256, prompt in self.wanted.items() if sha256 in missing]
        parts = []
        for start in range(0, len(new), SHARD_SIZE):
            prompts = tuple(new[start : start + SHARD_SIZE])
            facts = {"prompts": self.alike, "ids": [prompt.id.hex() for prompt in prompts]}
            seen = {sha256 for prompt in prompts for sha256 in prompt.references}
            tars = [*self._tars_of(seen)]
            place = f"{self.store.url}/{STAGE}"
            parts.append(PromptPart(digest_json(facts), prompts, tars, place))
        return parts

    def index(self, shards: Sequence[Shard]) -> tuple[bytes, LeftOut, int]:
        """The index, the samples without all of their prompts, and the number of prompts.

        Args:
            shards: all prompt shards.
        """
        places, rows = self.encoded.table(shards)
        index: dict[str, dict[str, Targets]] = {}
        bad: LeftOut = {}
        for key, groups in self.of_samples.items():
            for group, samples in groups.items():
                lists = [[rows.get(prompt.id) for prompt in sample] for sample in samples]
                whole = [[row for row in own if row is not None] for own in lists]
                index.setdefault(key, {})[group] = Targets.from_lists(whole)
                missing = {n: BAD_REFERENCE for n, own in enumerate(lists) if None in own}
                if missing:
                    bad.setdefault(key, {})[group] = missing
        return encode_index(places, index), bad, len(places)

    def _tars_of(self, seen: set[bytes]) -> Iterator[PictureShard]:
        """The pictures of these ids, each from one tar."""
        left = set(seen)
        for shard in self._tars:
            ids = self._ids[shard_key(shard.path)]
            if left.isdisjoint(ids):
                continue
            mask = np.zeros(shard.samples, bool)
            for row, sha256 in enumerate(ids):
                mask[row] = sha256 in left
                left.discard(sha256)
            yield shard.with_rows(mask)

    @cached_property
    def _tars(self) -> list[PictureShard]:
        return [] if self.pictures is None else Pictures(self.pictures).shards

    @cached_property
    def _ids(self) -> dict[str, list[bytes]]:
        return {} if self.pictures is None else picture_ids(self.pictures)


def encode_prompts(
    encoder: PipelineEncoder, device: Lock, max_pixels: int, request: dict[str, Any], folder: str
) -> dict[str, dict[str, Any]]:
    """Encode prompts to a prompt shard in `folder`.

    Args:
        device: held while the encoder runs.
        max_pixels: most pixels of a picture.

    Returns key -> facts of the shard: `prompts` ({group: number}), `longest` (rows of the longest
    prompt's embeddings) and `bad_reasons`.

    Raises:
        Damaged: a tar has another sha256.
    """
    bad: Counter[str] = Counter()
    family = family_named(encoder.info["family"])
    pictures: dict[str, Image.Image] = {}
    for shard in request["pictures"]:
        for sample in PictureShard(**shard).read():
            try:
                image = decode(sample.image, max_pixels)
            except BadSample as error:
                bad[str(error)] += 1
                continue
            pictures[sample.source_sha256.hex()] = family.condition_picture(image)
    encoded = []
    with device:
        for caption, seen in request["prompts"]:
            if not pictures.keys() >= set(seen):
                continue
            own = [pictures[sha256] for sha256 in seen]
            [embeds] = encoder.texts_with_pictures([caption], [own])
            if not np.isfinite(embeds).all():
                bad["NaN embedding"] += 1
                continue
            prompt = Prompt(caption, tuple(bytes.fromhex(sha256) for sha256 in seen))
            encoded.append((prompt.id, to_bfloat16(embeds)[None]))
    path = Path(folder, f"{request['key']}{PROMPT_SUFFIX}")
    groups = write_reference_shard(path, encoded)
    longest = max((embeds.shape[1] for _, embeds in encoded), default=1)
    facts: dict[str, Any] = {"prompts": groups, "longest": longest, "bad": bad.total()}
    return {request["key"]: {**facts, "bad_reasons": dict(sorted(bad.items()))}}
