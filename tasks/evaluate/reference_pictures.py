"""Held-out and training pictures of an images artifact, as the VAE received them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from artifacts.image_shards import Sample, read_tar
from artifacts.store import Artifact
from tasks.encode.transform import (
    BadSample,
    Size,
    TransformSettings,
    bucket_sizes,
    is_holdout,
    transform,
)
from tasks.evaluate.features import Split

#: More pictures hardly change a distance, while the search through a large dataset is slow.
LIMIT = 2000


def reference_pictures(
    images: Artifact,
    settings: TransformSettings,
    factor: int,
    split: Split,
    limit: int,
) -> Iterator[tuple[str, Sample, NDArray[np.uint8]]]:
    """The first `limit` pictures of a split: (path of the tar, sample, picture u8 [H, W, 3]).

    Predicate and transform are those of the encode stage. A row's hash selects its shard, so the
    first pictures are a random sample.

    Args:
        images: artifact of image shards.
        factor: sides are multiples of this many pixels.

    Raises:
        Damaged: a tar has another sha256 than was committed.
    """
    if split == "holdout" and settings.holdout == 0:
        return  # there is none, so no tar need be searched
    buckets = bucket_sizes(settings, factor)
    count = 0
    for entry in sorted(images.files, key=lambda entry: entry.path):
        if not entry.path.endswith(".tar"):
            continue
        for sample in read_tar(images.url(entry.path), entry.sha256):
            if count == limit:
                continue  # only to the end of the tar, which is checked there
            sha256 = sample.source_sha256
            if is_holdout(sha256, settings.holdout) != (split == "holdout"):
                continue
            picture = _transformed(sample, settings, buckets)
            if picture is not None:
                yield entry.path, sample, picture
                count += 1
        if count == limit:
            return


def find_pictures(
    images: Artifact,
    wanted: set[tuple[str, str]],
    settings: TransformSettings,
    factor: int,
) -> dict[tuple[str, str], NDArray[np.uint8]]:
    """Chosen pictures by (path of the tar, sample key); only their tars are read."""
    buckets = bucket_sizes(settings, factor)
    pictures = {}
    for entry in images.files:
        keys = {key for path, key in wanted if path == entry.path}
        if not keys:
            continue
        for sample in read_tar(images.url(entry.path), entry.sha256):
            if sample.key in keys:
                picture = _transformed(sample, settings, buckets)
                if picture is not None:
                    pictures[entry.path, sample.key] = picture
    return pictures


def _transformed(
    sample: Sample, settings: TransformSettings, buckets: list[Size]
) -> NDArray[np.uint8] | None:
    """The picture u8 [H, W, 3] as the VAE received it; None if the encode stage left it out."""
    try:
        seen = transform(sample.image, sample.source_sha256, sample.meta, settings, buckets)
    except BadSample:
        return None
    pixels = seen[0].pixels.transpose(1, 2, 0)
    return np.asarray(((pixels + 1.0) * 127.5).round().astype(np.uint8))
