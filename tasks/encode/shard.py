"""Encode image shards to latent shards on one device, deterministically in their content.

The pictures of an image shard are decoded ahead of the device, in batches of one bucket.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from artifacts import latent_shards
from artifacts.image_shards import Sample
from configs.errors import Refused
from runtimes.contract import PipelineEncoder
from runtimes.data.loader import Prefetch
from runtimes.families import family_named
from runtimes.pipeline_folder.folder import TEXT_BATCH
from tasks.encode import crop_to_bucket
from tasks.encode.crop_to_bucket import BadSample, Size, TransformSettings
from tasks.encode.near_duplicates import SUFFIX, thumbnail, write_thumbnails

Result = TypeVar("Result")


@dataclass
class DecodedPicture:
    """A transformed picture in a batch of its bucket."""

    position: int  # in the shard
    captions: tuple[str, ...]
    sha256: bytes
    score: float | None  # aesthetic
    thumbnail: NDArray[np.uint8]  # [16, 16]
    #: The plain one, then the mirrored one if there is one.
    variants: list[crop_to_bucket.Transformed]


@dataclass
class Batch:
    """Pictures of one bucket, and the VAE's inputs."""

    pictures: list[DecodedPicture]
    #: [B, 3, H, W] f32 of the plain variants, then of the mirrored ones if there are any
    pixels: list[NDArray[np.float32]]


def decoded_batches(
    samples: Iterable[Sample],
    settings: TransformSettings,
    buckets: list[Size],
    batch_size: int,
    decoders: Executor,
    ahead: int,
    bad: Counter[str],
) -> Iterator[Batch]:
    """The batches of a shard, formed per bucket in the order of its samples.

    A shard therefore always has the same batches, however many decoders work on it.

    Args:
        samples: in the order of the shard.
        batch_size: pictures per batch; the last batch of a bucket may have fewer.
        decoders: threads that decode and transform the pictures.
        ahead: maximum number of decoded pictures that wait for a batch.
        bad: counts the unusable pictures by their reasons.
    """
    waiting: dict[Size, list[DecodedPicture]] = {bucket: [] for bucket in buckets}

    def prepare(position: int, sample: Sample) -> DecodedPicture | BadSample:
        try:
            return _picture(position, sample, settings, buckets)
        except BadSample as error:
            return error

    jobs = (decoders.submit(prepare, number, sample) for number, sample in enumerate(samples))
    for picture in in_order(jobs, ahead):
        if isinstance(picture, BadSample):
            bad[str(picture)] += 1
            continue
        batch = waiting[picture.variants[0].target_size]
        batch.append(picture)
        if len(batch) == batch_size:
            yield _stacked(batch)
            batch.clear()
    for bucket in buckets:
        if waiting[bucket]:
            yield _stacked(waiting[bucket])


def in_order(jobs: Iterator[Future[Result]], ahead: int) -> Iterator[Result]:
    """The results of jobs in their order; at most `ahead` jobs are under way."""
    under_way: deque[Future[Result]] = deque()
    try:
        for job in jobs:
            under_way.append(job)
            if len(under_way) == ahead:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        for job in under_way:
            job.cancel()


def _picture(
    position: int, sample: Sample, settings: TransformSettings, buckets: list[Size]
) -> DecodedPicture:
    """Raises BadSample."""
    sha256 = sample.source_sha256
    image = crop_to_bucket.decode(sample.image, settings.max_pixels)
    mask = None if sample.mask is None else Image.open(BytesIO(sample.mask))
    control = None
    if settings.control:
        if sample.control is None:
            raise BadSample("no control picture")
        control = Image.open(BytesIO(sample.control))
    about = (image, sha256, sample.meta, settings, buckets)
    variants = crop_to_bucket.transform(*about, mask, control)
    score = sample.meta.get("aesthetic_score") if settings.scored else None
    if settings.scored and score is None:
        raise BadSample("no aesthetic score")
    return DecodedPicture(position, sample.captions, sha256, score, thumbnail(image), variants)


def _stacked(pictures: list[DecodedPicture]) -> Batch:
    """A batch whose pictures are views into its arrays."""
    pixels = []
    for variant in range(2):
        having = [picture for picture in pictures if len(picture.variants) > variant]
        if having:
            stack = np.stack([picture.variants[variant].pixels for picture in having])
            pixels.append(stack)
            for picture, row in zip(having, stack, strict=True):
                picture.variants[variant] = replace(picture.variants[variant], pixels=row)
    return Batch(list(pictures), pixels)


TOKEN_BIN = 8  # tokens per bin of the caption length histogram


@dataclass
class _Encoded:
    """A sample with an encoded picture; its captions are not encoded yet."""

    group: str  # <split>/<h>x<w>
    captions: tuple[str, ...]
    variants: list[latent_shards.LatentSample]  # as of DecodedPicture


class ShardEncoder:
    """Encodes shards on one device, one at a time, while others are decoded or written.

    Args:
        encoder: the encoders on the device.
        settings: those of the transform.
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
        self.encoder = encoder
        self._settings = settings
        self._encode_captions = _encode_captions if embeds else _tokenize_captions
        if family_named(encoder.info["family"]).sees_references:
            self._encode_captions = _store_captions
        buckets = crop_to_bucket.bucket_sizes(settings, encoder.info["size_step"])
        threads = ThreadPoolExecutor(decoders, thread_name_prefix="decode")
        ahead = 2 * max(batch_size, decoders)
        self._decoding = (settings, buckets, batch_size, threads, ahead)
        #: Held for a whole shard: shards that took turns would all be written at the same time.
        self.device = threading.Lock()

    def encode(self, samples: Iterable[Sample], path: Path) -> dict[str, Any]:
        """Encode samples to a latent shard at `path`; return the shard's facts. Thread-safe.

        The pictures' thumbnails are written beside it, to the path with the suffix .npy.

        The facts are {"groups": {group: samples}, "bad": n, "bad_reasons": {reason: n}, "captions":
        distinct captions, "uncaptioned": samples without a caption, "caption_tokens": {lowest
        length of the bin: n}, "cut": {text encoder: captions above its limit}, "truncated": that of
        the last encoder}. Where lengths vary, "longest" is the largest number of rows of a
        caption's embeddings; where pictures have masks, "masked" is their number.

        On one machine, a shard always has the same bytes.

        Raises:
            Refused: the text encoders return NaN for the empty caption.
        """
        bad: Counter[str] = Counter()
        batches = decoded_batches(samples, *self._decoding, bad)
        encoded: dict[int, _Encoded] = {}
        thumbnails: dict[int, tuple[bytes, NDArray[np.uint8]]] = {}
        with Prefetch(batches, depth=1) as ready, self.device:
            for batch in ready:
                thumbnails |= {p.position: (p.sha256, p.thumbnail) for p in batch.pictures}
                encoded.update(_encode_batch(batch, self.encoder, self._settings, bad))
            in_order = [encoded[position] for position in sorted(encoded)]
            captions = (caption for sample in in_order for caption in sample.captions)
            distinct = list(dict.fromkeys(["", *captions]))
            texts, rows = self._encode_captions(distinct, self.encoder)
        in_shard = (thumbnails[position] for position in sorted(thumbnails))
        write_thumbnails(path.with_suffix(SUFFIX), in_shard)
        return _write(path, in_order, texts, rows, self.encoder, bad)


def _write(
    path: Path,
    samples: list[_Encoded],
    texts: latent_shards.Texts,
    rows: dict[str, int],
    encoder: PipelineEncoder,
    bad: Counter[str],
) -> dict[str, Any]:
    """Write the latent shard and return its facts."""
    groups: dict[str, list[latent_shards.LatentSample]] = defaultdict(list)
    kept: list[str] = []
    uncaptioned = 0
    masked = 0
    for sample in samples:
        captions = [caption for caption in sample.captions if caption in rows]
        if not captions:
            bad["NaN embedding"] += 1
            continue
        kept += captions
        uncaptioned += not any(captions)
        masked += sample.variants[0].loss_mask is not None
        for latent in sample.variants:
            group = latent_shards.flipped_group(sample.group) if latent.flip else sample.group
            caption_rows = tuple(rows[c] for c in captions)
            groups[group].append(replace(latent, caption_rows=caption_rows))
    latent_shards.write_latent_shard(path, groups, texts)
    counts = {group: len(groups[group]) for group in sorted(groups)}
    return {
        "groups": {g: count for g, count in counts.items() if not g.startswith("flipped/")},
        "bad": bad.total(),
        "bad_reasons": dict(sorted(bad.items())),
        "captions": len(set(kept) - {""}),
        "uncaptioned": uncaptioned,
        **({"masked": masked} if masked else {}),
        **({"longest": max(map(len, texts.prompt_embeds or ()))} if texts.varying_lengths else {}),
        **_caption_lengths(kept, encoder),
    }


def _encode_batch(
    batch: Batch, encoder: PipelineEncoder, settings: TransformSettings, bad: Counter[str]
) -> Iterator[tuple[int, _Encoded]]:
    """(position in the shard, sample) of every picture with finite moments.

    The plain variants are encoded first, then the mirrored variants in a batch of their own.
    """
    by_position: dict[int, list[latent_shards.LatentSample | None]] = defaultdict(list)
    for variant, pixels in enumerate(batch.pixels):
        pictures = [picture for picture in batch.pictures if len(picture.variants) > variant]
        latents = _encode_variant(pictures, variant, pixels, encoder, settings)
        for picture, latent in zip(pictures, latents, strict=True):
            by_position[picture.position].append(latent)
    for picture in batch.pictures:
        variants = [latent for latent in by_position[picture.position] if latent is not None]
        if len(variants) < len(picture.variants):
            bad["NaN latent"] += 1
            continue
        is_holdout = crop_to_bucket.is_holdout(picture.sha256, settings.holdout)
        split = "holdout" if is_holdout else "train"
        height, width = variants[0].mean.shape[1:]
        yield picture.position, _Encoded(f"{split}/{height}x{width}", picture.captions, variants)


def _encode_variant(
    pictures: list[DecodedPicture],
    variant: int,
    pixels: NDArray[np.float32],
    encoder: PipelineEncoder,
    settings: TransformSettings,
) -> Iterator[latent_shards.LatentSample | None]:
    """The latents of each picture's variant 0 (plain) or 1 (mirrored); None if not finite.

    They have bf16 bits, which halves their memory until the shard is written.
    """
    means, logvars = encoder.images(pixels)
    # A mirrored picture has masks of its own, not mirrored masks.
    numbers = range(variant * settings.masks, (variant + 1) * settings.masks)
    draw = partial(crop_to_bucket.draw_mask, settings.seed, size=pixels.shape[2:])
    masks = [np.stack([draw(picture.sha256, number) for picture in pictures]) for number in numbers]
    masked_means = [encoder.images(np.where(m[:, None], np.float32(0), pixels))[0] for m in masks]
    controls = _controls([picture.variants[variant].control for picture in pictures], encoder)
    step = encoder.info["vae_scale_factor"]
    for row, picture in enumerate(pictures):
        decoded = picture.variants[variant]
        arrays = [means[row], logvars[row], *(masked[row] for masked in masked_means)]
        arrays += [] if controls is None else [controls[row]]
        if not all(np.isfinite(array).all() for array in arrays):
            yield None
            continue
        mean, logvar, *hidden = map(latent_shards.to_bfloat16, arrays[: 2 + len(masks)])
        # Nearest-neighbour reduction to the latents' size, as in diffusers' pipelines.
        small = [mask[row, ::step, ::step].astype(np.uint8) for mask in masks]
        loss_mask = None
        if decoded.mask is not None:
            loss_mask = crop_to_bucket.area_mean(decoded.mask, mean.shape[1:])
        yield latent_shards.LatentSample(
            mean=mean,
            logvar=logvar,
            id=picture.sha256,
            original_size=decoded.original_size,
            crop_top_left=decoded.crop_top_left,
            target_size=decoded.target_size,
            flip=decoded.flip,
            caption_rows=(),
            aesthetic_score=picture.score,
            masked=latent_shards.Masked(np.stack(small), np.stack(hidden)) if masks else None,
            loss_mask=loss_mask,
            control=None if controls is None else _stored(controls[row]),
        )


def _controls(
    pictures: Sequence[NDArray[np.uint8] | None], encoder: PipelineEncoder
) -> NDArray[Any] | None:
    """What the family's ControlNet reads of control pictures, each u8 [3, H, W]; None: none.

    That is [B, 3, H, W] u8 of pixels, or the means [B, C, h, w] f32 of the VAE.
    """
    present = [picture for picture in pictures if picture is not None]
    kind = family_named(encoder.info["family"]).control
    if not present or kind is None:
        return None
    stacked = np.stack(present)
    if kind == "pixels":
        return stacked
    return encoder.images(stacked.astype(np.float32) / 127.5 - 1)[0]


def _stored(control: NDArray[Any]) -> NDArray[Any]:
    return control if control.dtype == np.uint8 else latent_shards.to_bfloat16(control)


def _tokenize_captions(
    distinct: list[str], encoder: PipelineEncoder
) -> tuple[latent_shards.Texts, dict[str, int]]:
    """As `_encode_captions`, without embeddings."""
    starts = range(0, len(distinct), TEXT_BATCH)
    ids = [encoder.input_ids(distinct[start : start + TEXT_BATCH]) for start in starts]
    rows = {caption: row for row, caption in enumerate(distinct)}
    return latent_shards.Texts(None, None, np.concatenate(ids)), rows


def _store_captions(
    distinct: list[str], encoder: PipelineEncoder
) -> tuple[latent_shards.Texts, dict[str, int]]:
    """As `_tokenize_captions`, with the captions for prompts.py, which embeds them later."""
    texts, rows = _tokenize_captions(distinct, encoder)
    return replace(texts, captions=distinct), rows


def _encode_captions(
    distinct: list[str], encoder: PipelineEncoder
) -> tuple[latent_shards.Texts, dict[str, int]]:
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
                    raise Refused("the text encoders return NaN for the empty caption")
                continue
            rows[caption] = len(embeds)
            embeds.append(latent_shards.to_bfloat16(states[index]))
            ids.append(tokens[index])
            if summary is not None:
                pooled.append(latent_shards.to_bfloat16(summary))
    varying = family_named(encoder.info["family"]).varying_lengths
    return latent_shards.Texts(embeds, pooled or None, np.stack(ids), varying), rows


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
