"""Encode one image shard: tar in, safetensors out, in an order that its content alone decides."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from artifacts.images import Sample
from artifacts.latents import LatentSample, Texts, to_bfloat16, write_latent_shard
from tasks.encode.transform import (
    BadSample,
    Transformed,
    TransformSettings,
    bucket_sizes,
    is_holdout,
    transform,
)

TEXT_BATCH = 32  # captions that the text encoders take at once
TOKEN_BIN = 8  # tokens a bar of the caption length histogram


class Encodes(Protocol):
    """What is needed of an encoder; `runtimes.torch.encode.Encoder` is one."""

    info: dict[str, Any]

    def images(self, pixels: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[Any]]: ...

    def texts(self, captions: list[str]) -> tuple[NDArray[Any], NDArray[Any] | None]: ...

    def token_counts(self, captions: list[str]) -> list[int]: ...


@dataclass
class _Encoded:
    """A sample whose picture is encoded and whose captions wait for theirs."""

    group: str
    captions: tuple[str, ...]
    latent: LatentSample


@dataclass
class _Waiting:
    """Pictures of one bucket that wait for a full batch."""

    pictures: list[tuple[int, Sample, bytes, Transformed]] = field(default_factory=list)


def encode_shard(
    samples: Iterable[Sample],
    encoder: Encodes,
    settings: TransformSettings,
    batch_size: int,
    path: Path,
) -> dict[str, Any]:
    """Encode samples into a latent shard at `path`; returns the shard's facts.

    The facts are {"groups": {group: samples}, "bad": n, "bad_reasons": {reason: n}, "captions":
    distinct captions, "caption_tokens": {lowest length of the bar: n}, "truncated": n}.

    Batches are cut bucket by bucket in the order of the samples, so the same shard makes the same
    batches, and the same bytes on the same machine, whatever else the dataset holds.
    """
    bad: Counter[str] = Counter()
    encoded = dict(_encode_pictures(samples, encoder, settings, batch_size, bad))
    in_order = [encoded[place] for place in sorted(encoded)]
    texts, rows = _encode_captions(in_order, encoder)
    groups: dict[str, list[LatentSample]] = {}
    kept: list[str] = []
    for sample in in_order:
        captions = [caption for caption in sample.captions if caption in rows]
        if not captions:
            bad["NaN embedding"] += 1
            continue
        kept += captions
        latent = replace(sample.latent, caption_rows=tuple(rows[c] for c in captions))
        groups.setdefault(sample.group, []).append(latent)
    write_latent_shard(path, groups, texts)
    return {
        "groups": {group: len(groups[group]) for group in sorted(groups)},
        "bad": bad.total(),
        "bad_reasons": dict(sorted(bad.items())),
        "captions": len(set(kept) - {""}),
        **_caption_lengths(kept, encoder),
    }


def _encode_pictures(
    samples: Iterable[Sample],
    encoder: Encodes,
    settings: TransformSettings,
    batch_size: int,
    bad: Counter[str],
) -> Iterator[tuple[int, _Encoded]]:
    """(place in the shard, sample) for every picture that gives finite moments."""
    buckets = bucket_sizes(settings, encoder.info["vae_scale_factor"])
    waiting = {bucket: _Waiting() for bucket in buckets}
    for place, sample in enumerate(samples):
        sha256 = hashlib.sha256(sample.image).digest()
        try:
            picture = transform(sample.image, sha256, sample.meta, settings, buckets)
        except BadSample as error:
            bad[error.reason] += 1
            continue
        batch = waiting[picture.target_size].pictures
        batch.append((place, replace(sample, image=b""), sha256, picture))
        if len(batch) == batch_size:
            yield from _encode_batch(batch, encoder, settings.holdout, bad)
            batch.clear()
    for bucket in buckets:
        if waiting[bucket].pictures:
            yield from _encode_batch(waiting[bucket].pictures, encoder, settings.holdout, bad)


def _encode_batch(
    batch: list[tuple[int, Sample, bytes, Transformed]],
    encoder: Encodes,
    holdout: float,
    bad: Counter[str],
) -> Iterator[tuple[int, _Encoded]]:
    means, logvars = encoder.images(np.stack([picture.pixels for *_, picture in batch]))
    for (place, sample, sha256, picture), mean, logvar in zip(batch, means, logvars, strict=True):
        if not (np.isfinite(mean).all() and np.isfinite(logvar).all()):
            bad["NaN latent"] += 1
            continue
        split = "holdout" if is_holdout(sha256, holdout) else "train"
        latent = LatentSample(
            mean=to_bfloat16(mean),
            logvar=to_bfloat16(logvar),
            id=sha256,
            original_size=picture.original_size,
            crop_top_left=picture.crop_top_left,
            target_size=picture.target_size,
            flip=picture.flip,
            caption_rows=(),
        )
        group = f"{split}/{mean.shape[1]}x{mean.shape[2]}"
        yield place, _Encoded(group, sample.captions, latent)


def _encode_captions(samples: list[_Encoded], encoder: Encodes) -> tuple[Texts, dict[str, int]]:
    """Embeddings of the empty and every distinct caption, and the row of each that is finite."""
    distinct = list(dict.fromkeys(["", *(c for sample in samples for c in sample.captions)]))
    embeds: list[NDArray[np.uint16]] = []
    pooled: list[NDArray[np.uint16]] = []
    rows: dict[str, int] = {}
    for start in range(0, len(distinct), TEXT_BATCH):
        captions = distinct[start : start + TEXT_BATCH]
        states, summaries = encoder.texts(captions)
        for index, caption in enumerate(captions):
            summary = None if summaries is None else summaries[index]
            finite = np.isfinite(states[index]).all()
            if not finite or (summary is not None and not np.isfinite(summary).all()):
                if caption == "":
                    raise ValueError("the text encoders give NaN for the empty caption")
                continue
            rows[caption] = len(embeds)
            embeds.append(to_bfloat16(states[index]))
            if summary is not None:
                pooled.append(to_bfloat16(summary))
    return Texts(embeds, pooled or None), rows


def _caption_lengths(captions: list[str], encoder: Encodes) -> dict[str, Any]:
    """How long captions are, in tokens with both marks, and how many lose their end."""
    lengths: Counter[int] = Counter()
    truncated = 0
    for start in range(0, len(captions), TEXT_BATCH):
        for tokens in encoder.token_counts(captions[start : start + TEXT_BATCH]):
            lengths[tokens // TOKEN_BIN * TOKEN_BIN] += 1
            truncated += tokens > encoder.info["tokens"]
    histogram = {str(lowest): count for lowest, count in sorted(lengths.items())}
    return {"caption_tokens": histogram, "truncated": truncated}
