"""The held-out pictures that drawn ones are compared with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from artifacts.images import read_tar
from artifacts.store import Artifact
from tasks.encode.transform import (
    BadSample,
    TransformSettings,
    bucket_sizes,
    is_holdout,
    transform,
)

#: Enough for a distance; reading on through a large dataset would cost more than it tells.
MOST = 2000


def reference_pictures(
    images: Artifact, settings: TransformSettings, factor: int, most: int = MOST
) -> Iterator[NDArray[np.uint8]]:
    """The first `most` held-out pictures [H, W, 3], as the VAE saw them.

    The same predicate and transform as the encode stage's, so that no picture trained on is here;
    `factor` is what sides are multiples of. Raises Damaged for a tar that is not the committed one.
    """
    buckets = bucket_sizes(settings, factor)
    count = 0
    for entry in sorted(images.files, key=lambda entry: entry.path):
        if not entry.path.endswith(".tar"):
            continue
        for sample in read_tar(images.url(entry.path), entry.sha256):
            if count == most:
                continue  # only to the end of the tar, which is checked there
            sha256 = hashlib.sha256(sample.image).digest()
            if not is_holdout(sha256, settings.holdout):
                continue
            try:
                seen = transform(sample.image, sha256, sample.meta, settings, buckets)
            except BadSample:
                continue
            pixels = seen[0].pixels.transpose(1, 2, 0)
            yield ((pixels + 1.0) * 127.5).round().astype(np.uint8)
            count += 1
        if count == most:
            return
