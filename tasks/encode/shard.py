"""Encode one image shard: tar in, safetensors out, in an order that its content alone decides."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts.images import Sample
from artifacts.latents import (
    LatentSample,
    Masked,
    Texts,
    flipped_group,
    to_bfloat16,
    write_latent_shard,
)
from runtimes.contract import PipelineEncoder
from runtimes.pipeline_folder.describe import TEXT_BATCH
from tasks.encode.masks import draw_mask
from tasks.encode.transform import (
    BadSample,
    Transformed,
    TransformSettings,
    bucket_sizes,
    is_holdout,
    transform,
)

TOKEN_BIN = 8  # tokens a bar of the caption length histogram


@dataclass
class _Encoded:
    """A sample whose picture is encoded and whose captions wait for theirs."""

    group: str
    captions: tuple[str, ...]
    variants: list[LatentSample]  # as it is and, perhaps, mirrored


@dataclass
class _Picture:
    """A picture that waits for a full batch of its bucket."""

    place: int  # in the shard
    captions: tuple[str, ...]
    sha256: bytes
    score: float | None  # aesthetic
    variants: list[Transformed]


def encode_shard(
    samples: Iterable[Sample],
    encoder: PipelineEncoder,
    settings: TransformSettings,
    batch_size: int,
    path: Path,
) -> dict[str, Any]:
    """Encode samples into a latent shard at `path`; returns the shard's facts.

    The facts are {"groups": {group: samples}, "bad": n, "bad_reasons": {reason: n}, "captions":
    distinct captions, "uncaptioned": samples without one, "caption_tokens": {lowest length of the
    bar: n}, "truncated": n}.

    Batches are cut bucket by bucket in the order of the samples, so the same shard makes the same
    batches, and the same bytes on the same machine, whatever else the dataset holds.
    """
    bad: Counter[str] = Counter()
    encoded = dict(_encode_pictures(samples, encoder, settings, batch_size, bad))
    in_order = [encoded[place] for place in sorted(encoded)]
    texts, rows = _encode_captions(in_order, encoder)
    groups: dict[str, list[LatentSample]] = defaultdict(list)
    kept: list[str] = []
    uncaptioned = 0
    for sample in in_order:
        captions = [caption for caption in sample.captions if caption in rows]
        if not captions:
            bad["NaN embedding"] += 1
            continue
        kept += captions
        uncaptioned += not any(captions)
        for latent in sample.variants:
            group = flipped_group(sample.group) if latent.flip else sample.group
            caption_rows = tuple(rows[c] for c in captions)
            groups[group].append(replace(latent, caption_rows=caption_rows))
    write_latent_shard(path, groups, texts)
    counts = {group: len(groups[group]) for group in sorted(groups)}
    return {
        "groups": {g: count for g, count in counts.items() if not g.startswith("flipped/")},
        "bad": bad.total(),
        "bad_reasons": dict(sorted(bad.items())),
        "captions": len(set(kept) - {""}),
        "uncaptioned": uncaptioned,
        **_caption_lengths(kept, encoder),
    }


def _encode_pictures(
    samples: Iterable[Sample],
    encoder: PipelineEncoder,
    settings: TransformSettings,
    batch_size: int,
    bad: Counter[str],
) -> Iterator[tuple[int, _Encoded]]:
    """(place in the shard, sample) for every picture that gives finite moments."""
    buckets = bucket_sizes(settings, encoder.info["size_step"])
    waiting: dict[tuple[int, int], list[_Picture]] = {bucket: [] for bucket in buckets}
    for place, sample in enumerate(samples):
        sha256 = hashlib.sha256(sample.image).digest()
        try:
            variants = transform(sample.image, sha256, sample.meta, settings, buckets)
            score = sample.meta.get("aesthetic_score") if settings.scored else None
            if settings.scored and score is None:
                raise BadSample("no aesthetic score")
        except BadSample as error:
            bad[error.reason] += 1
            continue
        batch = waiting[variants[0].target_size]
        batch.append(_Picture(place, sample.captions, sha256, score, variants))
        if len(batch) == batch_size:
            yield from _encode_batch(batch, encoder, settings, bad)
            batch.clear()
    for bucket in buckets:
        if waiting[bucket]:
            yield from _encode_batch(waiting[bucket], encoder, settings, bad)


def _encode_batch(
    batch: list[_Picture], encoder: PipelineEncoder, settings: TransformSettings, bad: Counter[str]
) -> Iterator[tuple[int, _Encoded]]:
    """Mirrored variants go through the VAE after the pictures as they are, in a batch of theirs."""
    found: dict[int, list[LatentSample]] = defaultdict(list)
    for turn in range(2):
        turned = [picture for picture in batch if len(picture.variants) > turn]
        if turned:
            latents = _moments(turned, turn, encoder, settings)
            for picture, latent in zip(turned, latents, strict=True):
                found[picture.place].append(latent)
    for picture in batch:
        variants = found[picture.place]
        if not all(_is_finite(variant) for variant in variants):
            bad["NaN latent"] += 1
            continue
        split = "holdout" if is_holdout(picture.sha256, settings.holdout) else "train"
        height, width = variants[0].mean.shape[1:]
        rounded = [_rounded(variant) for variant in variants]
        yield picture.place, _Encoded(f"{split}/{height}x{width}", picture.captions, rounded)


def _is_finite(latent: LatentSample) -> bool:
    arrays = [latent.mean, latent.logvar]
    if latent.masked is not None:
        arrays.append(latent.masked.means)
    return all(np.isfinite(array).all() for array in arrays)


def _rounded(latent: LatentSample) -> LatentSample:
    """With bf16 bits: half of the memory while the rest of the shard is made."""
    masked = latent.masked
    if masked is not None:
        masked = replace(masked, means=to_bfloat16(masked.means))
    mean, logvar = to_bfloat16(latent.mean), to_bfloat16(latent.logvar)
    return replace(latent, mean=mean, logvar=logvar, masked=masked)


def _moments(
    pictures: list[_Picture], turn: int, encoder: PipelineEncoder, settings: TransformSettings
) -> list[LatentSample]:
    """Variant `turn` of each picture, in f32."""
    seen = [picture.variants[turn] for picture in pictures]
    pixels = np.stack([variant.pixels for variant in seen])
    means, logvars = encoder.images(pixels)
    masks = [
        np.stack(
            [
                # Those of a mirrored picture are others, not the same ones mirrored.
                draw_mask(settings.seed, p.sha256, turn * settings.masks + k, v.target_size)
                for p, v in zip(pictures, seen, strict=True)
            ]
        )
        for k in range(settings.masks)
    ]
    behind = [encoder.images(np.where(m[:, None], np.float32(0), pixels))[0] for m in masks]
    step = encoder.info["vae_scale_factor"]
    found = [
        LatentSample(
            mean=mean,
            logvar=logvar,
            id=picture.sha256,
            original_size=variant.original_size,
            crop_top_left=variant.crop_top_left,
            target_size=variant.target_size,
            flip=variant.flip,
            caption_rows=(),
            aesthetic_score=picture.score,
        )
        for picture, variant, mean, logvar in zip(pictures, seen, means, logvars, strict=True)
    ]
    if not masks:
        return found
    return [
        replace(
            latent,
            # As diffusers' pipelines bring a mask to the latents' size: every so many pixels.
            masked=Masked(
                np.stack([mask[row, ::step, ::step] for mask in masks]).astype(np.uint8),
                np.stack([mean[row] for mean in behind]),
            ),
        )
        for row, latent in enumerate(found)
    ]


def _encode_captions(
    samples: list[_Encoded], encoder: PipelineEncoder
) -> tuple[Texts, dict[str, int]]:
    """Texts of the empty and every distinct caption, and the row of each that is finite."""
    distinct = list(dict.fromkeys(["", *(c for sample in samples for c in sample.captions)]))
    embeds: list[NDArray[np.uint16]] = []
    pooled: list[NDArray[np.uint16]] = []
    ids: list[NDArray[np.int64]] = []
    rows: dict[str, int] = {}
    for start in range(0, len(distinct), TEXT_BATCH):
        captions = distinct[start : start + TEXT_BATCH]
        states, summaries = encoder.texts(captions)
        tokens = encoder.input_ids(captions)
        for index, caption in enumerate(captions):
            summary = None if summaries is None else summaries[index]
            finite = np.isfinite(states[index]).all()
            if not finite or (summary is not None and not np.isfinite(summary).all()):
                if caption == "":
                    raise ValueError("the text encoders give NaN for the empty caption")
                continue
            rows[caption] = len(embeds)
            embeds.append(to_bfloat16(states[index]))
            ids.append(tokens[index])
            if summary is not None:
                pooled.append(to_bfloat16(summary))
    return Texts(embeds, pooled or None, np.stack(ids)), rows


def _caption_lengths(captions: list[str], encoder: PipelineEncoder) -> dict[str, Any]:
    """How long captions are, in tokens with both marks, and how many lose their end."""
    lengths: Counter[int] = Counter()
    truncated = 0
    for start in range(0, len(captions), TEXT_BATCH):
        for tokens in encoder.token_counts(captions[start : start + TEXT_BATCH]):
            lengths[tokens // TOKEN_BIN * TOKEN_BIN] += 1
            truncated += tokens > encoder.info["caption_tokens"]
    histogram = {str(lowest): count for lowest, count in sorted(lengths.items())}
    return {"caption_tokens": histogram, "truncated": truncated}
