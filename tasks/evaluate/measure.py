"""Measure a model's pictures and losses, alike for the base, the tuned model and the champion.

References are held-out and training pictures of an images artifact, as the VAE received them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from artifacts.image_shards import Sample, read_tar
from artifacts.latent_shards import open_latents
from artifacts.records import digest_json
from artifacts.store import Artifact, Shard, Store
from configs.settings.evaluate import Memorization
from tasks.encode import crop_to_bucket
from tasks.encode.crop_to_bucket import TransformSettings, bucket_sizes, is_holdout
from tasks.encode.near_duplicates import SIDE, mirror_parts, near_any, thumbnail
from tasks.evaluate import distances, memorization, metrics
from tasks.evaluate.draw import read_losses, read_pictures
from tasks.evaluate.features import (
    Clip,
    Float32,
    ImageEncoder,
    Pixels,
    ReferenceFeatures,
    Split,
    WholePictures,
    batches,
    open_image_encoder,
    reference_features,
)
from tasks.evaluate.inception import Inception
from tasks.evaluate.inputs import EvalInputs
from tasks.evaluate.judges import Judge, Scores, clip_scores, judge_pictures, open_judges
from tasks.evaluate.memorization import NearestTraining, nearest
from tasks.pictures import Pictures
from tasks.progress import Report

#: More pictures hardly change a distance, while the search through a large dataset is slow.
LIMIT = 2000


def reference_pictures(
    pictures: Pictures,
    settings: TransformSettings,
    factor: int,
    split: Split,
    limit: int,
    left_out: Set[str] = frozenset(),
    *,
    distinct: bool = False,
) -> Iterator[tuple[str, Sample, NDArray[np.uint8]]]:
    """The first `limit` pictures of a split: (path of the tar, sample, picture u8 [H, W, 3]).

    Predicate and transform are those of the encode stage. A row's hash selects its shard, so the
    first pictures are a random sample.

    Args:
        factor: sides are multiples of this many pixels.
        left_out: sha256 (hex) of pictures that are not among them.
        distinct: whether near-duplicates of an earlier one are left out: radii of precision and
            recall end at neighbours, and copies would shrink them.

    Raises:
        Damaged: a tar has another sha256 than was committed.
    """
    if split == "holdout" and settings.holdout == 0:
        return  # there is none, so no tar need be searched
    buckets = bucket_sizes(settings, factor)
    count = 0
    earlier = mirror_parts(np.zeros((0, SIDE, SIDE), np.uint8))
    for shard in pictures.shards:
        for sample in shard.read():
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


log = logging.getLogger("kiln")

BATCH = 256  # pictures in memory
#: Names of the encoders of pictures. IMAGE may have the model of CLIP, and sees whole pictures.
CLIP = "clip"
IMAGE = "image"
PIXELS = "pixels"
INCEPTION = "inception"
#: Encoder -> the distances of its features. CMMD has those of CLIP, by its definition.
BY_ENCODER: dict[str, dict[str, distances.Distance]] = {
    CLIP: {metrics.CMMD: distances.cmmd},
    IMAGE: distances.DISTANCES,
    INCEPTION: distances.INCEPTION_DISTANCES,
}
References = Mapping[str, ReferenceFeatures]  # by encoder


@dataclass(frozen=True)
class Measured:
    """A model's metrics, and the training pictures nearest to its own."""

    metrics: dict[str, distances.Estimate]
    nearest: NearestTraining | None  # None without training pictures


@dataclass(frozen=True)
class MetricSuite:
    """The metrics of an evaluation, with the references that comparable measurements share."""

    rounds: tuple[metrics.PromptSets, ...]
    compared: tuple[str, ...]  # prompt sets whose pictures are compared with the held-out pictures
    judges: Mapping[str, Judge]  # by metric name
    #: For held-out samples; that for drawn pictures has their prompts.
    resampling: distances.Resampling
    encoders: Mapping[str, ImageEncoder]
    text_features: Float32  # [N, D] of CLIP, one row per picture
    held_out: References
    training: References
    memorization: Memorization

    @classmethod
    def of(cls, inputs: EvalInputs, store: Store, progress: Report) -> MetricSuite:
        """The metrics of a recipe. Raises Refused if a model fails to load."""
        settings = inputs.recipe.evaluate
        models = inputs.measuring
        rounds = metrics.prompt_rounds(settings, inputs.rounds)
        prompts = metrics.all_prompts(*rounds)
        clip = Clip(models.clip, settings.device)
        clip.tell_cut_prompts(prompts)
        image: ImageEncoder = WholePictures(clip)
        if models.image_encoder is not None:
            image = open_image_encoder(models.image_encoder, settings.device)
        searching: dict[str, ImageEncoder] = {IMAGE: image, PIXELS: Pixels()}  # of memorisation
        encoders = {CLIP: clip, **searching}
        if models.inception is not None:
            encoders[INCEPTION] = Inception(models.inception, settings.device)
        judges = open_judges(settings.judges, models.preference_models, settings.device, prompts)
        limit = settings.memorization.pictures
        return cls(
            rounds=rounds,
            compared=metrics.compared_sets(settings),
            judges=judges,
            resampling=distances.Resampling(settings.bootstrap, settings.seed),
            encoders=encoders,
            text_features=clip.texts(prompts),
            held_out=_references(inputs, store, encoders, "holdout", LIMIT, progress),
            training=_references(inputs, store, searching, "train", limit, progress),
            memorization=settings.memorization,
        )

    @property
    def shards(self) -> list[Shard]:
        """The stored features of the references."""
        return [reference.shard for reference in (*self.held_out.values(), *self.training.values())]

    @property
    def prompts(self) -> distances.Prompts:
        """The number of every picture's prompt."""
        return metrics.prompt_numbers(*self.rounds)

    def _of_pictures(self, numbers: Iterable[int]) -> distances.Resampling:
        """The resampling of some drawn pictures, by their prompts."""
        prompts = self.prompts
        return replace(self.resampling, prompts=tuple(prompts[number] for number in numbers))

    def measure(
        self,
        store: Store,
        drawn: Sequence[Shard],
        model: str = "model",
        progress: Report = lambda done, total, text: None,
    ) -> Measured:
        """The metrics of the pictures that a model drew.

        Args:
            drawn: its shard of each round, by `draw`.
            model: the model's name for the progress, such as "base".
        """
        features, scores = self._look(store, drawn, model, progress)
        count = self.resampling.count  # with a large encoder's features, this takes some seconds
        log.info("evaluate: intervals of the %s by %s resamples", model, f"{count:,}")
        similarity = clip_scores(features[CLIP], self.text_features)
        every = self._of_pictures(range(len(self.prompts)))
        whole = {metrics.CLIP_SCORE: distances.mean(similarity, every)}
        estimates = whole | self._by_set(metrics.CLIP_SCORE, similarity)
        estimates |= self._distances(features)
        estimates |= metrics.holdout_losses(read_losses(store, drawn[0]), self.resampling)
        closest = self.nearest_training(features)
        if closest is not None:
            estimates |= closest.metrics(self.memorization, every)
        for name, values in scores.items():
            estimates |= self._by_set(name, values)
        return Measured(metrics.with_ranges(estimates), closest)

    def _look(
        self, store: Store, drawn: Sequence[Shard], model: str, progress: Report
    ) -> tuple[dict[str, Float32], dict[str, Scores]]:
        """Features by each encoder and scores by each judge, one row per picture."""
        features: dict[str, list[Float32]] = {name: [] for name in self.encoders}
        scores: dict[str, list[Scores]] = {name: [] for name in self.judges}
        prompts = metrics.all_prompts(*self.rounds)
        start = 0
        for pictures in batches(read_pictures(store, *drawn), BATCH):
            for name, encoder in self.encoders.items():
                features[name].append(encoder.images(pictures))
            if self.judges:
                asked = prompts[start : start + len(pictures)]
                judged = judge_pictures(self.judges, np.stack(pictures), asked)
                for name, batch in judged.items():
                    scores[name].append(batch)
            start += len(pictures)
            total = len(prompts)
            progress(start, total, f"{start:,} of {total:,} pictures of the {model} measured")
        by_encoder = {name: np.concatenate(rows) for name, rows in features.items()}
        return by_encoder, {name: np.concatenate(rows) for name, rows in scores.items()}

    def _by_set(self, name: str, scores: Scores) -> dict[str, distances.Estimate]:
        summary = distances.share if scores.dtype == bool else distances.mean
        return {
            f"{name}/{which}": summary(scores[numbers], self._of_pictures(numbers))
            for which, numbers in metrics.pictures_by_set(*self.rounds).items()
        }

    def _distances(self, features: Mapping[str, Float32]) -> dict[str, distances.Estimate]:
        numbers = metrics.pictures_by_set(*self.rounds)
        chosen = [number for name in self.compared for number in numbers[name]]
        if min(len(self.held_out[CLIP].features), len(chosen)) < metrics.LEAST_COMPARED:
            return {}
        resampling = self._of_pictures(chosen)
        estimates: dict[str, distances.Estimate] = {}
        for encoder, functions in BY_ENCODER.items():
            if encoder in features:
                drawn = features[encoder][chosen]
                reference = self.held_out[encoder].features
                for name, distance in functions.items():
                    estimates[name] = distance(drawn, reference, resampling)
        return estimates

    def nearest_training(self, features: Mapping[str, Float32]) -> NearestTraining | None:
        """The training pictures nearest to others, by their features; None without pictures."""
        if not len(features[IMAGE]) or not len(self.training[IMAGE].features):
            return None
        return NearestTraining(
            nearest(features[IMAGE], self.training[IMAGE].features),
            nearest(features[PIXELS], self.training[PIXELS].features),
        )

    def memorization_facts(self) -> dict[str, Any]:
        """Thresholds, sizes, and the share and the closest of held-out pictures.

        Held-out pictures are no copies: they show what a threshold counts by chance.
        """
        facts: dict[str, Any] = {
            "thresholds": self.memorization.model_dump(mode="json"),
            "training_pictures": len(self.training[IMAGE].features),
            "held_out_pictures": len(self.held_out[IMAGE].features),
        }
        held_out = {name: self.held_out[name].features for name in (IMAGE, PIXELS)}
        if (by_chance := self.nearest_training(held_out)) is not None:
            resampling = distances.Resampling(1, self.resampling.seed)
            shares = by_chance.metrics(self.memorization, resampling)
            facts["closest_held_out"] = {
                memorization.FEATURES: float(by_chance.features.similarity.max()),
                memorization.PIXELS: float(by_chance.pixels.similarity.max()),
            }
            facts["held_out"] = {name: share.value for name, share in shares.items()}
        return facts


@contextmanager
def memory_released() -> Iterator[None]:
    """Decorates a function that measures: after it, the next stages have the memory.

    That is the device's memory of the models, and the host's of the bootstrap weights.
    """
    from runtimes.torch.device import free_memory  # seconds to import

    try:
        yield
    finally:
        distances.Resampling.weights.cache_clear()
        free_memory()


def _references(
    inputs: EvalInputs,
    store: Store,
    models: Mapping[str, ImageEncoder],
    split: Split,
    limit: int,
    progress: Report,
) -> References:
    settings = TransformSettings.of(inputs.recipe)
    latents = open_latents(inputs.latents.uri)
    factor = latents.info["size_step"]
    chosen = inputs.held_out
    name = "held-out"
    count = latents.held_out
    left_out: Set[str] = frozenset()
    if split == "train":
        left_out = inputs.left_out
        chosen = inputs.training
        name = "training"
        count = latents.training
    facts = {
        "images": chosen.images.digest,
        **({"choice": chosen.digest} if chosen.digest is not None else {}),
        "transform": vars(settings),
        "factor": factor,
        "split": split,
        "limit": limit,
        **({"left_out": digest_json(sorted(left_out))} if left_out else {}),
    }
    distinct = split == "holdout" and inputs.recipe.encode.leave_out_copies
    facts |= {"distinct": True} if distinct else {}
    pictures = reference_pictures(
        chosen, settings, factor, split, limit, left_out, distinct=distinct
    )
    digests = inputs.measuring.digests()  # its names CLIP and INCEPTION are ours
    digests[IMAGE] = f"whole pictures {digests.get('image_encoder', digests['clip'])}"
    digests[PIXELS] = Pixels.digest

    def tell(done: int) -> None:
        total = max(done, min(limit, count))
        progress(done, total, f"{done:,} of {total:,} {name} pictures measured")

    return reference_features(store, models, digests, facts, pictures, tell)
