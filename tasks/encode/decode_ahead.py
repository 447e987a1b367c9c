"""Decode the pictures of an image shard ahead of the device, in batches of one bucket."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from artifacts.image_shards import Sample
from tasks.encode.buckets import Size
from tasks.encode.decode_and_crop import BadSample, Transformed, TransformSettings, transform


@dataclass
class DecodedPicture:
    """A transformed picture in a batch of its bucket."""

    position: int  # in the shard
    captions: tuple[str, ...]
    sha256: bytes
    score: float | None  # aesthetic
    variants: list[Transformed]  # the plain one, then the mirrored one if there is one


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
    for found in _in_order(jobs, ahead):
        if isinstance(found, BadSample):
            bad[found.reason] += 1
            continue
        batch = waiting[found.variants[0].target_size]
        batch.append(found)
        if len(batch) == batch_size:
            yield _stacked(batch)
            batch.clear()
    for bucket in buckets:
        if waiting[bucket]:
            yield _stacked(waiting[bucket])


def _in_order(
    jobs: Iterator[Future[DecodedPicture | BadSample]], ahead: int
) -> Iterator[DecodedPicture | BadSample]:
    """The results of jobs in their order; at most `ahead` jobs are under way."""
    under_way: deque[Future[DecodedPicture | BadSample]] = deque()
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
    variants = transform(sample.image, sha256, sample.meta, settings, buckets)
    score = sample.meta.get("aesthetic_score") if settings.scored else None
    if settings.scored and score is None:
        raise BadSample("no aesthetic score")
    return DecodedPicture(position, sample.captions, sha256, score, variants)


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
