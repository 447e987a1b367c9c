"""Measure a model's pictures and losses, alike for the base, the tuned model and the champion.

References are held-out and training pictures of an images artifact, as the VAE received them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from artifacts.image_shards import Sample, read_tar
from artifacts.latent_shards import open_latents
from artifacts.store import Artifact, Shard, Store
from configs.settings.evaluate import Memorization
from tasks.encode.transform import (
    BadSample,
    Size,
    TransformSettings,
    bucket_sizes,
    is_holdout,
    transform,
)
from tasks.evaluate import distances, memorization
from tasks.evaluate.draw import read_losses, read_pictures
from tasks.evaluate.features import (
    Clip,
    FeatureExtractor,
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
from tasks.evaluate.judges import Judge, Scores, judge_pictures, open_judges
from tasks.evaluate.memorization import NearestTraining, nearest
from tasks.evaluate.metrics import (
    CLIP_SCORE,
    CMMD,
    LEAST_COMPARED,
    PromptSets,
    all_prompts,
    compared_sets,
    holdout_losses,
    prompt_numbers,
    prompt_sets,
    slices_by_set,
    with_ranges,
)
from tasks.progress import Report

#: More pictures hardly change a distance, while the search through a large dataset is slow.
LIMIT = 2000


def reference_pictures(
    images: Artifact, settings: TransformSettings, factor: int, split: Split, limit: int
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
    sample: Sample, settings: TransformSettings, buckets: list[Size]
) -> NDArray[np.uint8] | None:
    """The picture u8 [H, W, 3] as the VAE received it; None if the encode stage left it out."""
    try:
        seen = transform(sample.image, sample.source_sha256, sample.meta, settings, buckets)
    except BadSample:
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
References = Mapping[str, ReferenceFeatures]  # by encoder


@dataclass(frozen=True)
class Measured:
    """A model's metrics, and the training pictures nearest to its own."""

    metrics: dict[str, distances.Estimate]
    nearest: NearestTraining | None  # None without training pictures


@dataclass(frozen=True)
class MetricSuite:
    """The metrics of an evaluation, with the references that comparable measurements share."""

    sets: PromptSets
    compared: tuple[str, ...]  # prompt sets whose pictures are compared with the held-out pictures
    judges: Mapping[str, Judge]  # by metric name
    resampling: (
        distances.Resampling
    )  # for held-out samples; that for drawn pictures has their prompts
    encoders: Mapping[str, ImageEncoder]
    text_features: Float32  # [N, D] of CLIP, one row per picture
    held_out: References
    training: References
    memorization: Memorization

    @classmethod
    def of(cls, inputs: EvalInputs, store: Store, progress: Report) -> MetricSuite:
        """The metrics of a recipe. Raises Refused if a model fails to load."""
        recipe = inputs.recipe
        settings = inputs.recipe.evaluate
        sets = prompt_sets(inputs.recipe.evaluate)
        prompts = all_prompts(sets)
        models = inputs.measuring.preference_models
        clip = Clip(inputs.measuring.clip, settings.device)
        clip.tell_cut_prompts(prompts)
        image: ImageEncoder = WholePictures(clip)
        if inputs.measuring.image_encoder is not None:
            image = open_image_encoder(inputs.measuring.image_encoder, settings.device)
        searching: dict[str, ImageEncoder] = {IMAGE: image, PIXELS: Pixels()}  # of memorisation
        encoders = {CLIP: clip, **searching}
        if inputs.measuring.inception is not None:
            encoders[INCEPTION] = Inception(inputs.measuring.inception, settings.device)
        return cls(
            sets=sets,
            compared=compared_sets(recipe.evaluate),
            judges=open_judges(settings.judges, models, settings.device, prompts),
            resampling=distances.Resampling(settings.bootstrap, settings.seed),
            encoders=encoders,
            text_features=clip.texts(prompts),
            held_out=_references(inputs, store, encoders, "holdout", LIMIT, progress),
            training=_references(
                *(inputs, store, searching, "train", settings.memorization.pictures, progress)
            ),
            memorization=settings.memorization,
        )

    @property
    def shards(self) -> list[Shard]:
        """The stored features of the references."""
        return [reference.shard for reference in (*self.held_out.values(), *self.training.values())]

    @property
    def prompts(self) -> distances.Prompts:
        """The number of every picture's prompt."""
        return prompt_numbers(self.sets)

    def _by_prompt(self, prompts: distances.Prompts) -> distances.Resampling:
        return replace(self.resampling, prompts=prompts)

    def measure(
        self,
        store: Store,
        drawn: Shard,
        model: str = "model",
        progress: Report = lambda done, total, text: None,
    ) -> Measured:
        """The metrics of the pictures that a model drew.

        Args:
            drawn: shard of `draw`.
            model: the model's name for the progress, such as "base".
        """
        features, scores = self._look(store, drawn, model, progress)
        count = self.resampling.count  # with a large encoder's features, this takes some seconds
        log.info("evaluate: intervals of the %s by %s resamples", model, f"{count:,}")
        estimates = self._clip_scores(features[CLIP]) | self._distances(features)
        estimates |= holdout_losses(read_losses(store, drawn), self.resampling)
        closest = self.nearest_training(features)
        if closest is not None:
            estimates |= closest.metrics(self.memorization, self._by_prompt(self.prompts))
        return Measured(with_ranges(estimates | self._judged(scores)), closest)

    def _look(
        self, store: Store, drawn: Shard, model: str, progress: Report
    ) -> tuple[dict[str, Float32], dict[str, Scores]]:
        """Features by each encoder and scores by each judge, one row per picture."""
        features: dict[str, list[Float32]] = {name: [] for name in self.encoders}
        scores: dict[str, list[Scores]] = {name: [] for name in self.judges}
        prompts = all_prompts(self.sets)
        start = 0
        for pictures in batches(read_pictures(store, drawn), BATCH):
            for name, encoder in self.encoders.items():
                features[name].append(encoder.images(pictures))
            if self.judges:
                asked = prompts[start : start + len(pictures)]
                judged = judge_pictures(self.judges, np.stack(pictures), asked)
                for name, batch in judged.items():
                    scores[name].append(batch)
            start += len(pictures)
            words = f"{start:,} of {len(prompts):,} pictures of the {model} measured"
            progress(start, len(prompts), words)
        by_encoder = {name: np.concatenate(rows) for name, rows in features.items()}
        return by_encoder, {name: np.concatenate(rows) for name, rows in scores.items()}

    def _clip_scores(self, features: Float32) -> dict[str, distances.Estimate]:
        scores = distances.clip_scores(features, self.text_features)
        whole = {CLIP_SCORE: distances.mean(scores, self._by_prompt(self.prompts))}
        return whole | self._by_set(CLIP_SCORE, scores)

    def _by_set(self, name: str, scores: Scores) -> dict[str, distances.Estimate]:
        summary = distances.share if scores.dtype == bool else distances.mean
        return {
            f"{name}/{which}": summary(scores[part], self._by_prompt(self.prompts[part]))
            for which, part in slices_by_set(self.sets).items()
        }

    def _distances(self, features: Mapping[str, Float32]) -> dict[str, distances.Estimate]:
        parts = slices_by_set(self.sets)
        chosen = np.array([n for name in self.compared for n in _numbers(parts[name])], int)
        if min(len(self.held_out[CLIP].features), len(chosen)) < LEAST_COMPARED:
            return {}
        resampling = self._by_prompt(tuple(self.prompts[n] for n in chosen))
        by_clip = features[CLIP][chosen]
        by_image = features[IMAGE][chosen]
        reference = self.held_out[IMAGE].features
        estimates = {CMMD: distances.cmmd(by_clip, self.held_out[CLIP].features, resampling)}
        for name, distance in distances.DISTANCES.items():
            estimates[name] = distance(by_image, reference, resampling)
        if INCEPTION in features:
            drawn = features[INCEPTION][chosen]
            reference = self.held_out[INCEPTION].features
            for name, distance in distances.INCEPTION_DISTANCES.items():
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

    def _judged(self, scores: Mapping[str, Scores]) -> dict[str, distances.Estimate]:
        estimates: dict[str, distances.Estimate] = {}
        for name, values in scores.items():
            estimates |= self._by_set(name, values)
        return estimates


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


def memorization_facts(suite: MetricSuite) -> dict[str, object]:
    """Thresholds, sizes, and the share and the closest of held-out pictures.

    Held-out pictures are no copies: they show what a threshold counts by chance.
    """
    facts: dict[str, object] = {
        "thresholds": suite.memorization.model_dump(mode="json"),
        "training_pictures": len(suite.training[IMAGE].features),
        "held_out_pictures": len(suite.held_out[IMAGE].features),
    }
    held_out = {name: suite.held_out[name].features for name in (IMAGE, PIXELS)}
    if (by_chance := suite.nearest_training(held_out)) is not None:
        shares = by_chance.metrics(
            suite.memorization, distances.Resampling(1, suite.resampling.seed)
        )
        facts["closest_held_out"] = {
            memorization.FEATURES: float(by_chance.features.similarity.max()),
            memorization.PIXELS: float(by_chance.pixels.similarity.max()),
        }
        facts["held_out"] = {
            memorization.FEATURES: shares[memorization.FEATURES].value,
            memorization.PIXELS: shares[memorization.PIXELS].value,
        }
    return facts


def _numbers(part: slice) -> range:
    return range(part.start, part.stop)


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
    digests = inputs.measuring.digests()
    identities = {
        CLIP: digests["clip"],
        IMAGE: f"whole pictures {digests.get('image_encoder', digests['clip'])}",
        PIXELS: Pixels.digest,
    }
    if INCEPTION in models:
        identities[INCEPTION] = digests["inception"]
    images = inputs.training if split == "train" else inputs.images
    facts = {
        "images": images.digest,
        "transform": vars(settings),
        "factor": factor,
        "split": split,
        "limit": limit,
    }
    pictures = reference_pictures(images, settings, factor, split, limit)
    name = "held-out"
    count = latents.held_out
    if split == "train":
        name = "training"
        count = latents.training

    def tell(done: int) -> None:
        total = max(done, min(limit, count))
        progress(done, total, f"{done:,} of {total:,} {name} pictures measured")

    encoders = {key: FeatureExtractor(identities[key], model) for key, model in models.items()}
    return reference_features(store, encoders, facts, pictures, tell)
