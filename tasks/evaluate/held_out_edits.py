"""Held-out samples of an edit model as prompts: caption, references, and the picture as target.

Captions are those that encoding stored, so that a model is asked in the words that it learnt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import islice

from artifacts.image_shards import Sample
from artifacts.latent_shards import open_latents, shard_key
from artifacts.store import Artifact
from configs.errors import Failed, Refused
from configs.settings.recipe import Recipe
from tasks.caption.tables import Rule
from tasks.download.references import REFERENCES
from tasks.encode.captions import encoded_samples
from tasks.encode.crop_to_bucket import TransformSettings
from tasks.encode.references import pictures_of
from tasks.evaluate.edits import Picture, PictureFile, Prompt, keep, keep_picture
from tasks.evaluate.seen_pictures import reference_pictures
from tasks.pictures import Pictures, sources_of
from tasks.reference_pairs import picture_ids, read_pairs

Ids = tuple[bytes, ...]  # sha256 of references, in order


def held_out_prompts(
    recipe: Recipe, latents: Artifact, pictures: Pictures, count: int
) -> list[Prompt]:
    """The first held-out samples with all of their references, as prompts.

    Args:
        pictures: of the latents.
        count: maximum number, of all sources together.

    Raises:
        Refused: there are none.
        Failed: the references or the captions were deleted.
    """
    factor = open_latents(latents.uri).info["size_step"]
    parts = recipe.by_source
    encoded = sources_of(latents)
    prompts: list[Prompt] = []
    for source, own in pictures.by_source.items():
        settings = TransformSettings.of(parts[source])
        captions = _parent(encoded[source], "captions")
        read = partial(
            encoded_samples,
            rule=None if captions is None else asdict(Rule.read(captions)),
            holdout=settings.holdout,
            settings=parts[source].encode.captions,
        )
        captioned = replace(own, captions=captions)
        seen = reference_pictures(captioned, settings, factor, "holdout", count, read=read)
        left = count - len(prompts)
        pairs = ((sample, target) for _, sample, target in seen)
        prompts += _of_source(encoded[source], pairs, left)
    if not prompts:
        raise Refused(
            "evaluate.prompts: no held-out sample has all of its references: raise "
            "encode.holdout, or remove the sets with held_out"
        )
    return prompts


def _of_source(
    latents: Artifact, seen: Iterator[tuple[Sample, Picture]], count: int
) -> list[Prompt]:
    references = _parent(latents, REFERENCES)
    ids = {} if references is None else _ids_by_target(references)
    complete = (
        (sample, target, own)
        for sample, target in seen
        if (own := ids.get(sample.source_sha256, ())) is not None
    )
    chosen = [
        (sample.captions[0], own, keep_picture(target).path)
        for sample, target, own in islice(complete, count)
    ]
    wanted = {sha256 for _, own, _ in chosen for sha256 in own}
    files = _files(references, wanted) if references is not None and wanted else {}
    return [
        Prompt(text, tuple(files[sha256].path for sha256 in own), target)
        for text, own, target in chosen
    ]


def _parent(latents: Artifact, name: str) -> Artifact | None:
    """What the latents were encoded with; None if the source has none. Raises Failed."""
    at = latents.manifest["run"].get("parents", {}).get(name)
    if at is None:
        return None
    parent = latents.store.load(at["stage"], at["key"])
    if parent is None:
        raise Failed(f"{at['stage']} {at['key'][:12]}: it was deleted: run again")
    return parent


def _ids_by_target(references: Artifact) -> dict[bytes, Ids | None]:
    """Sha256 of each picture -> its references; None if one of them was not downloaded.

    Of a picture in several rows, those of the first row that has all.
    """
    ids: dict[bytes, Ids | None] = {}
    for pairs in read_pairs(references).values():
        for pair in pairs:
            if ids.get(pair.id) is None:
                ids[pair.id] = pair.references
    return ids


def _files(references: Artifact, wanted: set[bytes]) -> Mapping[bytes, PictureFile]:
    """Local files of downloaded references; only the tars with some of them are read."""
    images = pictures_of(references)
    files: dict[bytes, PictureFile] = {}
    ids = {} if images is None else picture_ids(images)
    for shard in [] if images is None else Pictures(images).shards:
        if wanted.isdisjoint(ids[shard_key(shard.path)]):
            continue
        for sample in shard.read():
            if sample.source_sha256 in wanted:
                files.setdefault(sample.source_sha256, keep(sample.image))
    return files
