"""Pictures of an images artifact, as the VAE received them.

An evaluation compares drawn pictures with them: those of the held-out split, or of the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from artifacts.image_shards import Sample, read_tar
from artifacts.store import Artifact
from tasks.encode import crop_to_bucket
from tasks.encode.crop_to_bucket import TransformSettings, bucket_sizes, is_holdout
from tasks.encode.near_duplicates import SIDE, mirror_parts, near_any, thumbnail
from tasks.evaluate.features import Split
from tasks.pictures import Pictures, PictureShard

#: Path of the tar, sample, and picture u8 [H, W, 3].
Transformed = tuple[str, Sample, NDArray[np.uint8]]


def reference_pictures(
    pictures: Pictures,
    settings: TransformSettings,
    factor: int,
    split: Split,
    limit: int,
    left_out: Set[str] = frozenset(),
    *,
    distinct: bool = False,
    read: Callable[[PictureShard], Iterator[Sample]] = PictureShard.read,
) -> Iterator[Transformed]:
    """The first `limit` pictures of a split: (path of the tar, sample, picture u8 [H, W, 3]).

    Predicate and transform are those of the encode stage. A row's hash selects its shard, so the
    first pictures are a random sample.

    Args:
        factor: sides are multiples of this many pixels.
        left_out: sha256 (hex) of pictures that are not among them.
        distinct: whether near-duplicates of an earlier one are left out: radii of precision and
            recall end at neighbours, and copies would shrink them.
        read: of a shard's samples; by default they have the captions of the source.

    Raises:
        Damaged: a tar has another sha256 than was committed.
    """
    if split == "holdout" and settings.holdout == 0:
        return  # there is none, so no tar need be searched
    buckets = bucket_sizes(settings, factor)
    count = 0
    earlier = mirror_parts(np.zeros((0, SIDE, SIDE), np.uint8))
    for shard in pictures.shards:
        for sample in read(shard):
            if count == limit:
                continue  # only to the end of the tar, which is checked there
            sha256 = sample.source_sha256
            if is_holdout(sha256, settings.holdout) != (split == "holdout"):
                continue
            if sha256.hex() in left_out:
                continue
            picture = _transformed(sample, settings, buckets)
            if picture is None:
                continue
            if distinct:
                grey = thumbnail(Image.fromarray(picture))[None]
                if near_any(grey, earlier).any():
                    continue
                earlier = np.concatenate([earlier, mirror_parts(grey)], axis=1)
            yield shard.path, sample, picture
            count += 1
        if count == limit:
            return


def find_pictures(
    images: Artifact, wanted: set[tuple[str, str]], settings: TransformSettings, factor: int
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
    sample: Sample, settings: TransformSettings, buckets: list[crop_to_bucket.Size]
) -> NDArray[np.uint8] | None:
    """The picture u8 [H, W, 3] as the VAE received it; None if the encode stage left it out."""
    try:
        image = crop_to_bucket.decode(sample.image, settings.max_pixels)
        about = (sample.source_sha256, sample.meta, settings, buckets)
        seen = crop_to_bucket.transform(image, *about)
    except crop_to_bucket.BadSample:
        return None
    pixels = seen[0].pixels.transpose(1, 2, 0)
    return np.asarray(((pixels + 1.0) * 127.5).round().astype(np.uint8))
