"""Held-out pictures: the reference set of `cmmd` and `fd`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from artifacts.image_shards import read_tar
from artifacts.store import Artifact
from tasks.encode.buckets import bucket_sizes
from tasks.encode.decode_and_crop import BadSample, TransformSettings, transform
from tasks.encode.holdout_split import is_holdout

#: More pictures hardly change a distance, while the search through a large dataset is slow.
LIMIT = 2000


def reference_pictures(
    images: Artifact, settings: TransformSettings, factor: int, limit: int = LIMIT
) -> Iterator[NDArray[np.uint8]]:
    """The first `limit` held-out pictures u8 [H, W, 3], as the VAE received them.

    The predicate and the transform are those of the encode stage, which excludes all training
    pictures.

    Args:
        images: artifact of image shards.
        factor: sides are multiples of this many pixels.

    Raises:
        Damaged: a tar has another sha256 than the committed one.
    """
    buckets = bucket_sizes(settings, factor)
    count = 0
    for entry in sorted(images.files, key=lambda entry: entry.path):
        if not entry.path.endswith(".tar"):
            continue
        for sample in read_tar(images.url(entry.path), entry.sha256):
            if count == limit:
                continue  # only to the end of the tar, which is checked there
            sha256 = sample.source_sha256
            if not is_holdout(sha256, settings.holdout):
                continue
            try:
                seen = transform(sample.image, sha256, sample.meta, settings, buckets)
            except BadSample:
                continue
            pixels = seen[0].pixels.transpose(1, 2, 0)
            yield ((pixels + 1.0) * 127.5).round().astype(np.uint8)
            count += 1
        if count == limit:
            return
