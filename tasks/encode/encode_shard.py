"""Encode one image shard to a latent shard, deterministically in its content."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts.image_shards import Sample
from artifacts.latent_shard_writer import write_latent_shard
from artifacts.latent_shards import (
    LatentSample,
    Masked,
    Texts,
    flipped_group,
    to_bfloat16,
)
from runtimes.contract import PipelineEncoder, WrongInput
from runtimes.pipeline_folder.describe_encoders import TEXT_BATCH
from tasks.encode.buckets import bucket_sizes
from tasks.encode.decode_and_crop import BadSample, Transformed, TransformSettings, transform
from tasks.encode.holdout_split import is_holdout
from tasks.encode.masks import draw_mask

TOKEN_BIN = 8  # tokens per bin of the caption length histogram


@dataclass
class _Encoded:
    """A sample with an encoded picture; its captions are not encoded yet."""

    group: str  # <split>/<h>x<w>
    captions: tuple[str, ...]
    variants: list[LatentSample]  # the plain one, then the mirrored one if there is one


@dataclass
class _Picture:
    """A transformed picture in a batch of its bucket."""

    position: int  # in the shard
    captions: tuple[str, ...]
    sha256: bytes
    score: float | None  # aesthetic
    variants: list[Transformed]  # the plain one, then the mirrored one if there is one


def encode_shard(
    samples: Iterable[Sample],
    encoder: PipelineEncoder,
    settings: TransformSettings,
    batch_size: int,
    path: Path,
) -> dict[str, Any]:
    """Encode samples to a latent shard at `path`; return the shard's facts.

    The facts are {"groups": {group: samples}, "bad": n, "bad_reasons": {reason: n}, "captions":
    distinct captions, "uncaptioned": samples without one, "caption_tokens": {lowest length of the
    bin: n}, "truncated": captions above the encoder's limit}.

    Batches are formed per bucket in sample order. A shard therefore always has the same batches,
    and on one machine the same bytes.

    Raises:
        WrongInput: the text encoders return NaN for the empty caption.
    """
    bad: Counter[str] = Counter()
    encoded = dict(_encode_pictures(samples, encoder, settings, batch_size, bad))
    in_order = [encoded[position] for position in sorted(encoded)]
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
    """(position in the shard, sample) of every picture with finite moments."""
    buckets = bucket_sizes(settings, encoder.info["size_step"])
    waiting: dict[tuple[int, int], list[_Picture]] = {bucket: [] for bucket in buckets}
    for position, sample in enumerate(samples):
        sha256 = sample.source_sha256
        try:
            variants = transform(sample.image, sha256, sample.meta, settings, buckets)
            score = sample.meta.get("aesthetic_score") if settings.scored else None
            if settings.scored and score is None:
                raise BadSample("no aesthetic score")
        except BadSample as error:
            bad[error.reason] += 1
            continue
        batch = waiting[variants[0].target_size]
        batch.append(_Picture(position, sample.captions, sha256, score, variants))
        if len(batch) == batch_size:
            yield from _encode_batch(batch, encoder, settings, bad)
            batch.clear()
    for bucket in buckets:
        if waiting[bucket]:
            yield from _encode_batch(waiting[bucket], encoder, settings, bad)


def _encode_batch(
    batch: list[_Picture], encoder: PipelineEncoder, settings: TransformSettings, bad: Counter[str]
) -> Iterator[tuple[int, _Encoded]]:
    """Encode a batch: first the plain variants, then the mirrored ones in a batch of their own."""
    found: dict[int, list[LatentSample | None]] = defaultdict(list)
    for variant in range(2):
        pictures = [picture for picture in batch if len(picture.variants) > variant]
        if pictures:
            latents = _encode_variant(pictures, variant, encoder, settings)
            for picture, latent in zip(pictures, latents, strict=True):
                found[picture.position].append(latent)
    for picture in batch:
        variants = [latent for latent in found[picture.position] if latent is not None]
        if len(variants) < len(picture.variants):
            bad["NaN latent"] += 1
            continue
        split = "holdout" if is_holdout(picture.sha256, settings.holdout) else "train"
        height, width = variants[0].mean.shape[1:]
        yield picture.position, _Encoded(f"{split}/{height}x{width}", picture.captions, variants)


def _encode_variant(
    pictures: list[_Picture], variant: int, encoder: PipelineEncoder, settings: TransformSettings
) -> Iterator[LatentSample | None]:
    """The latents of each picture's variant 0 (plain) or 1 (mirrored); None if not finite.

    They have bf16 bits, which halves their memory until the shard is written.
    """
    transformed = [picture.variants[variant] for picture in pictures]
    pixels = np.stack([one.pixels for one in transformed])
    means, logvars = encoder.images(pixels)
    masks = [
        np.stack(
            [
                # A mirrored picture has masks of its own, not mirrored ones.
                draw_mask(settings.seed, p.sha256, variant * settings.masks + k, t.target_size)
                for p, t in zip(pictures, transformed, strict=True)
            ]
        )
        for k in range(settings.masks)
    ]
    masked_means = [encoder.images(np.where(m[:, None], np.float32(0), pixels))[0] for m in masks]
    step = encoder.info["vae_scale_factor"]
    for row, (picture, one) in enumerate(zip(pictures, transformed, strict=True)):
        arrays = [means[row], logvars[row], *(masked[row] for masked in masked_means)]
        if not all(np.isfinite(array).all() for array in arrays):
            yield None
            continue
        mean, logvar, *hidden = map(to_bfloat16, arrays)
        # Nearest-neighbour reduction to the latents' size, as in diffusers' pipelines.
        small = [mask[row, ::step, ::step].astype(np.uint8) for mask in masks]
        yield LatentSample(
            mean=mean,
            logvar=logvar,
            id=picture.sha256,
            original_size=one.original_size,
            crop_top_left=one.crop_top_left,
            target_size=one.target_size,
            flip=one.flip,
            caption_rows=(),
            aesthetic_score=picture.score,
            masked=Masked(np.stack(small), np.stack(hidden)) if masks else None,
        )


def _encode_captions(
    samples: list[_Encoded], encoder: PipelineEncoder
) -> tuple[Texts, dict[str, int]]:
    """The encoded distinct captions, the empty one first, and caption -> row if it is finite."""
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
                    raise WrongInput("the text encoders return NaN for the empty caption")
                continue
            rows[caption] = len(embeds)
            embeds.append(to_bfloat16(states[index]))
            ids.append(tokens[index])
            if summary is not None:
                pooled.append(to_bfloat16(summary))
    return Texts(embeds, pooled or None, np.stack(ids)), rows


def _caption_lengths(captions: list[str], encoder: PipelineEncoder) -> dict[str, Any]:
    """Histogram of caption lengths in tokens, special tokens included, and truncated captions."""
    lengths: Counter[int] = Counter()
    truncated = 0
    for start in range(0, len(captions), TEXT_BATCH):
        for tokens in encoder.token_counts(captions[start : start + TEXT_BATCH]):
            lengths[tokens // TOKEN_BIN * TOKEN_BIN] += 1
            truncated += tokens > encoder.info["caption_tokens"]
    histogram = {str(lowest): count for lowest, count in sorted(lengths.items())}
    return {"caption_tokens": histogram, "truncated": truncated}
