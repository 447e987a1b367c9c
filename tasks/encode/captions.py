"""The captions that are encoded: words replaced, tags shuffled and left out, in variants.

A variant depends on its picture's sha256, the seed and its number: a source that grows changes
none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from artifacts.image_shards import Sample
from configs.settings.data import Captions
from tasks.encode.crop_to_bucket import is_holdout
from tasks.pictures import PictureShard


def encoded_captions(
    captions: Sequence[str], sha256: bytes, settings: Captions, *, held_out: bool
) -> tuple[str, ...]:
    """The captions of a picture to encode; a step draws one of them.

    Args:
        captions: those of the source or of a model.
        sha256: of the downloaded picture.
        held_out: whether the tags stay as they are, for losses that compare.
    """
    captions = settings.prompts or [replaced(text, settings.replace) for text in captions]
    if held_out or not settings.varies:
        return tuple(captions)
    keys = (
        [settings.seed, int.from_bytes(sha256, "big"), caption, number]
        for caption in range(len(captions))
        for number in range(settings.variants)
    )
    return tuple(_variant(captions[key[2]], settings, key) for key in keys)


def encoded_samples(
    pictures: PictureShard,
    rule: Mapping[str, Any] | None,
    holdout: float,
    settings: Captions | None,
) -> Iterator[Sample]:
    """Pictures of an image shard, with the captions to encode.

    Args:
        rule: of the captions, see PictureShard.read.
        holdout: fraction of the pictures in the held-out split.
        settings: changes of the captions; None: none.

    Raises:
        Damaged: tar or table has another sha256.
    """
    for sample in pictures.read(rule, holdout):
        if settings is None:
            yield sample
            continue
        sha256 = sample.source_sha256
        held_out = is_holdout(sha256, holdout)
        texts = encoded_captions(sample.captions, sha256, settings, held_out=held_out)
        yield replace(sample, captions=texts)


def replaced(text: str, words: Mapping[str, str]) -> str:
    """The text with other words, all at once; a longer one comes before one that it contains."""
    if not words:
        return text
    longest = sorted(words, key=len, reverse=True)
    pattern = rf"(?<!\w)(?:{'|'.join(map(re.escape, longest))})(?!\w)"
    return re.sub(pattern, lambda match: words[match[0]], text)


def _variant(caption: str, settings: Captions, key: Sequence[int]) -> str:
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
    separator = settings.separator
    tags = [tag for part in caption.split(separator) if (tag := part.strip())]
    kept = tags[: settings.keep_tags]
    rest = tags[settings.keep_tags :]
    order = rng.permutation(len(rest)) if settings.shuffle else range(len(rest))
    stays = rng.random(len(rest)) >= settings.tag_dropout
    between = separator if separator[-1].isspace() else f"{separator} "
    return between.join([*kept, *(rest[place] for place in order if stays[place])])
