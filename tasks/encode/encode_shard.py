"""Encode image shards to latent shards on one device, deterministically in their content."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts.image_shards import Sample
from artifacts.latent_shards import (
    LatentSample,
    Masked,
    Texts,
    flipped_group,
    to_bfloat16,
    write_latent_shard,
)
from runtimes.contract import PipelineEncoder, WrongInput
from runtimes.data.loader import Prefetch
from runtimes.families import family_named
from runtimes.pipeline_folder.folder import TEXT_BATCH
from tasks.encode.buckets import bucket_sizes
from tasks.encode.decode_ahead import Batch, DecodedPicture, decoded_batches
from tasks.encode.decode_and_crop import TransformSettings
from tasks.encode.holdout_split import is_holdout
from tasks.encode.masks import draw_mask

TOKEN_BIN = 8  # tokens per bin of the caption length histogram


@dataclass
class _Encoded:
    """A sample with an encoded picture; its captions are not encoded yet."""

    group: str  # <split>/<h>x<w>
    captions: tuple[str, ...]
    variants: list[LatentSample]  # the plain one, then the mirrored one if there is one


class ShardEncoder:
    """Encodes shards on one device, one at a time, while others are decoded or written.

    Args:
        encoder: the encoders on the device.
        settings: of the transform.
        batch_size: pictures per forward pass.
        decoders: threads that decode pictures.
        embeds: whether shards have embeddings of captions, besides their token ids.
    """

    def __init__(
        self,
        encoder: PipelineEncoder,
        settings: TransformSettings,
        batch_size: int,
        decoders: int = 1,
        *,
        embeds: bool = True,
    ) -> None:
        self.encoder, self._settings, self._batch_size = encoder, settings, batch_size
        self._encode_captions = _encode_captions if embeds else _tokenize_captions
        self._buckets = bucket_sizes(settings, encoder.info["size_step"])
        self._ahead = 2 * max(batch_size, decoders)
        self._decoders = ThreadPoolExecutor(decoders, thread_name_prefix="decode")
        #: Held for a whole shard: shards that took turns would all be written at the same time.
        self._device = threading.Lock()

    def encode(self, samples: Iterable[Sample], path: Path) -> dict[str, Any]:
        """Encode samples to a latent shard at `path`; return the shard's facts. Thread-safe.

        The facts are {"groups": {group: samples}, "bad": n, "bad_reasons": {reason: n}, "captions":
        distinct captions, "uncaptioned": samples without one, "caption_tokens": {lowest length of
        the bin: n}, "cut": {text encoder: captions above its limit}, "truncated": that of the last
        encoder}. Where lengths vary, "longest" is the largest number of rows of a caption's
        embeddings.

        On one machine, a shard always has the same bytes.

        Raises:
            WrongInput: the text encoders return NaN for the empty caption.
        """
        bad: Counter[str] = Counter()
        batches = decoded_batches(
            samples,
            self._settings,
            self._buckets,
            self._batch_size,
            self._decoders,
            self._ahead,
            bad,
        )
        encoded: dict[int, _Encoded] = {}
        with Prefetch(batches, depth=1) as ready, self._device:
            for batch in ready:
                encoded.update(_encode_batch(batch, self.encoder, self._settings, bad))
            in_order = [encoded[position] for position in sorted(encoded)]
            texts, rows = self._encode_captions(_distinct(in_order), self.encoder)
        return _write(path, in_order, texts, rows, self.encoder, bad)


def _write(
    path: Path,
    samples: list[_Encoded],
    texts: Texts,
    rows: dict[str, int],
    encoder: PipelineEncoder,
    bad: Counter[str],
) -> dict[str, Any]:
    """Write the latent shard and return its facts."""
    groups: dict[str, list[LatentSample]] = defaultdict(list)
    kept: list[str] = []
    uncaptioned = 0
    for sample in samples:
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
        **({"longest": max(map(len, texts.prompt_embeds or ()))} if texts.varying_lengths else {}),
        **_caption_lengths(kept, encoder),
    }


def _encode_batch(
    batch: Batch, encoder: PipelineEncoder, settings: TransformSettings, bad: Counter[str]
) -> Iterator[tuple[int, _Encoded]]:
    """(position in the shard, sample) of every picture with finite moments.

    The plain variants are encoded first, then the mirrored ones in a batch of their own.
    """
    found: dict[int, list[LatentSample | None]] = defaultdict(list)
    for variant, pixels in enumerate(batch.pixels):
        pictures = [picture for picture in batch.pictures if len(picture.variants) > variant]
        latents = _encode_variant(pictures, variant, pixels, encoder, settings)
        for picture, latent in zip(pictures, latents, strict=True):
            found[picture.position].append(latent)
    for picture in batch.pictures:
        variants = [latent for latent in found[picture.position] if latent is not None]
        if len(variants) < len(picture.variants):
            bad["NaN latent"] += 1
            continue
        split = "holdout" if is_holdout(picture.sha256, settings.holdout) else "train"
        height, width = variants[0].mean.shape[1:]
        yield picture.position, _Encoded(f"{split}/{height}x{width}", picture.captions, variants)


def _encode_variant(
    pictures: list[DecodedPicture],
    variant: int,
    pixels: NDArray[np.float32],
    encoder: PipelineEncoder,
    settings: TransformSettings,
) -> Iterator[LatentSample | None]:
    """The latents of each picture's variant 0 (plain) or 1 (mirrored); None if not finite.

    They have bf16 bits, which halves their memory until the shard is written.
    """
    transformed = [picture.variants[variant] for picture in pictures]
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


def _distinct(samples: list[_Encoded]) -> list[str]:
    """The distinct captions, the empty one first."""
    return list(dict.fromkeys(["", *(c for sample in samples for c in sample.captions)]))


def _tokenize_captions(
    distinct: list[str], encoder: PipelineEncoder
) -> tuple[Texts, dict[str, int]]:
    """As `_encode_captions`, without embeddings."""
    starts = range(0, len(distinct), TEXT_BATCH)
    ids = [encoder.input_ids(distinct[start : start + TEXT_BATCH]) for start in starts]
    rows = {caption: row for row, caption in enumerate(distinct)}
    return Texts(None, None, np.concatenate(ids)), rows


def _encode_captions(distinct: list[str], encoder: PipelineEncoder) -> tuple[Texts, dict[str, int]]:
    """The encoded captions, and caption -> row if it is finite."""
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
    varying = family_named(encoder.info["family"]).varying_lengths
    return Texts(embeds, pooled or None, np.stack(ids), varying), rows


def _caption_lengths(captions: list[str], encoder: PipelineEncoder) -> dict[str, Any]:
    """Histogram of caption lengths in tokens, special ones included, and the captions cut.

    The lengths are those of the encoder that reads the longest captions.
    """
    lengths: Counter[int] = Counter()
    cut: Counter[str] = Counter()
    for start in range(0, len(captions), TEXT_BATCH):
        counts = encoder.token_counts(captions[start : start + TEXT_BATCH])
        for name, tokens in counts.items():
            cut[name] += sum(count > encoder.limits[name] for count in tokens)
        *_, longest = counts.values()
        lengths.update(count // TOKEN_BIN * TOKEN_BIN for count in longest)
    histogram = {str(lowest): count for lowest, count in sorted(lengths.items())}
    *_, truncated = 0, *cut.values()
    return {"caption_tokens": histogram, "cut": dict(cut), "truncated": truncated}
