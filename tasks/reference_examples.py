"""References of some pictures, beside which a page shows them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from artifacts.image_shards import read_tar
from artifacts.latent_shards import shard_key
from artifacts.store import Artifact
from tasks.data_set import IMAGES, DataSet
from tasks.download.references import REFERENCES
from tasks.encode.references import pictures_of
from tasks.reference_pairs import picture_ids, read_pairs

MOST = 3  # of a picture
TARS = 24  # that are read for references

Place = tuple[str, int]  # sha256 of an image shard's tar, and row


def reference_examples(
    data: DataSet, places: Collection[Place], small: Callable[[bytes], bytes]
) -> dict[Place, list[bytes]]:
    """The first references of pictures, in their order; without those of tars beyond TARS.

    Args:
        data: whose latents name the references; without latents, nothing is found.
        small: makes a thumbnail of a picture's file.

    Raises:
        Failed: the references were deleted.
        Damaged: a tar that is read to its end has another sha256 than was committed.
    """
    references = _references(data)
    images = None if references is None else pictures_of(references)
    if references is None or images is None:
        return {}
    ids = _ids(data, references, places)
    found = _thumbnails(images, {sha256 for own in ids.values() for sha256 in own}, small)
    return {place: [found[one] for one in own if one in found] for place, own in ids.items()}


def _references(data: DataSet) -> Artifact | None:
    latents = data.artifacts.get("encode")
    parents = {} if latents is None else latents.manifest["run"].get("parents", {})
    at = parents.get(REFERENCES)
    return None if at is None or latents is None else latents.store.load(at["stage"], at["key"])


def _ids(
    data: DataSet, references: Artifact, places: Collection[Place]
) -> Mapping[Place, tuple[bytes, ...]]:
    pairs = read_pairs(references)
    keys = {file.sha256: shard_key(file.path) for file in data.artifacts[IMAGES].files}
    return {
        (tar, row): (pairs[keys[tar]][row].references or ())[:MOST]
        for tar, row in places
        if keys[tar] in pairs
    }


def _thumbnails(
    images: Artifact, wanted: set[bytes], small: Callable[[bytes], bytes]
) -> dict[bytes, bytes]:
    """Sha256 of a reference -> its thumbnail."""
    ids = picture_ids(images) if wanted else {}
    tars = [
        file.path
        for file in images.files
        if file.path.endswith(".tar") and not wanted.isdisjoint(ids.get(shard_key(file.path), ()))
    ]
    found: dict[bytes, bytes] = {}
    for path in tars[:TARS]:
        for sample in read_tar(images.url(path)):
            if sample.source_sha256 in wanted and sample.source_sha256 not in found:
                found[sample.source_sha256] = small(sample.image)
    return found
