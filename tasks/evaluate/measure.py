"""Measure a model's pictures and losses, alike for the base, the tuned model and the champion.

References are held-out and training pictures of an images artifact, as the VAE received them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from artifacts.latent_shards import open_latents
from artifacts.records import digest_json
from artifacts.store import Shard, Store
from configs.settings.evaluate import Memorization
from tasks.encode.crop_to_bucket import TransformSettings
from tasks.evaluate import distances, edits, memorization, metrics
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
from tasks.evaluate.inputs import EvalInputs, transforms_of
from tasks.evaluate.judges import Judge, Scores, clip_scores, cosine, judge_pictures, open_judges
from tasks.evaluate.memorization import NearestTraining, nearest
from tasks.evaluate.seen_pictures import Transformed, reference_pictures
from tasks.progress import Report

#: More pictures hardly change a distance, while the search through a large dataset is slow.
LIMIT = 2000


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
    learnt: Sequence[str]  # sources of a mixture without regularisation
    judges: Mapping[str, Judge]  # by metric name
    #: For held-out samples; that for drawn pictures has their prompts.
    resampling: distances.Resampling
    encoders: Mapping[str, ImageEncoder]
    text_features: Float32  # [N, D] of CLIP, one row per picture
    held_out: References
    training: References
    memorization: Memorization
    files: edits.Files = field(default_factory=dict)  # of the prompts' pictures
    edited: Mapping[str, Float32] = field(
        default_factory=dict
    )  # place -> its features [D] by IMAGE

    @classmethod
    def of(cls, inputs: EvalInputs, store: Store, progress: Report) -> MetricSuite:
        """The metrics of a recipe. Raises Refused if a model fails to load."""
        settings = inputs.recipe.evaluate
        models = inputs.measuring
        rounds = inputs.prompts
        prompts = [prompt.text for prompt in metrics.all_prompts(*rounds)]
        clip = Clip(models.clip, settings.measuring_device)
        clip.tell_cut_prompts(prompts)
        image: ImageEncoder = WholePictures(clip)
        if models.image_encoder is not None:
            image = open_image_encoder(models.image_encoder, settings.measuring_device)
        searching: dict[str, ImageEncoder] = {IMAGE: image, PIXELS: Pixels()}  # of memorisation
        encoders = {CLIP: clip, **searching}
        if models.inception is not None:
            encoders[INCEPTION] = Inception(models.inception, settings.measuring_device)
        judges = open_judges(
            settings.judges, models.preference_models, settings.measuring_device, prompts
        )
        limit = settings.memorization.pictures
        return cls(
            rounds=rounds,
            compared=metrics.compared_sets(settings),
            learnt=inputs.recipe.learnt,
            judges=judges,
            resampling=distances.Resampling(settings.bootstrap, settings.seed),
            encoders=encoders,
            text_features=clip.texts(prompts),
            held_out=_references(inputs, store, encoders, "holdout", LIMIT, progress),
            training=_references(inputs, store, searching, "train", limit, progress),
            memorization=settings.memorization,
            files=inputs.files,
            edited=_features_of_files(inputs.files, metrics.all_prompts(*rounds), image),
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
        features, scores, kept = self._look(store, drawn, model, progress)
        count = self.resampling.count  # with a large encoder's features, this takes some seconds
        log.info("evaluate: intervals of the %s by %s resamples", model, f"{count:,}")
        similarity = clip_scores(features[CLIP], self.text_features)
        every = self._of_pictures(range(len(self.prompts)))
        whole = {metrics.CLIP_SCORE: distances.mean(similarity, every)}
        estimates = whole | self._by_set(metrics.CLIP_SCORE, similarity)
        estimates |= self._similarities(features[IMAGE], kept)
        estimates |= self._distances(features)
        estimates |= metrics.holdout_losses(
            read_losses(store, drawn[0]), self.learnt, self.resampling
        )
        closest = self.nearest_training(features)
        if closest is not None:
            estimates |= closest.metrics(self.memorization, every)
        for name, values in scores.items():
            estimates |= self._by_set(name, values)
        return Measured(metrics.with_ranges(estimates), closest)

    def _look(
        self, store: Store, drawn: Sequence[Shard], model: str, progress: Report
    ) -> tuple[dict[str, Float32], dict[str, Scores], dict[int, float]]:
        """Features by each encoder and scores by each judge, one row per picture.

        And kept_similarity by the numbers of the pictures whose prompts have a mask.
        """
        features: dict[str, list[Float32]] = {name: [] for name in self.encoders}
        scores: dict[str, list[Scores]] = {name: [] for name in self.judges}
        kept: dict[int, float] = {}
        prompts = metrics.all_prompts(*self.rounds)
        start = 0
        for pictures in batches(read_pictures(store, *drawn), BATCH):
            for name, encoder in self.encoders.items():
                features[name].append(encoder.images(pictures))
            asked = prompts[start : start + len(pictures)]
            kept |= self._kept(start, pictures, asked)
            if self.judges:
                texts = [prompt.text for prompt in asked]
                references = [self._first_reference(prompt) for prompt in asked]
                judged = judge_pictures(self.judges, np.stack(pictures), texts, references)
                for name, batch in judged.items():
                    scores[name].append(batch)
            start += len(pictures)
            total = len(prompts)
            progress(start, total, f"{start:,} of {total:,} pictures of the {model} measured")
        by_encoder = {name: np.concatenate(rows) for name, rows in features.items()}
        return by_encoder, {name: np.concatenate(rows) for name, rows in scores.items()}, kept

    def _first_reference(self, prompt: edits.Prompt) -> edits.Picture | None:
        return self.files[prompt.references[0]].read() if prompt.references else None

    def _kept(
        self, start: int, pictures: Sequence[edits.Picture], prompts: Sequence[edits.Prompt]
    ) -> dict[int, float]:
        """kept_similarity of the pictures from number `start` on whose prompts have a mask."""
        kept = {}
        for number, (picture, prompt) in enumerate(zip(pictures, prompts, strict=True), start):
            before = self._first_reference(prompt) if prompt.mask is not None else None
            if before is not None and prompt.mask is not None:
                mask = self.files[prompt.mask].read()
                kept[number] = edits.kept_similarity(picture, before, mask)
        return kept

    def _similarities(
        self, features: Float32, kept: Mapping[int, float]
    ) -> dict[str, distances.Estimate]:
        """The likeness of each picture to its target and to its references, overall and by set.

        Args:
            features: [N, D] of all pictures by IMAGE.
            kept: kept_similarity by the numbers of some pictures.
        """
        to_target: dict[int, float] = {}
        to_references: dict[int, float] = {}
        for number, prompt in enumerate(metrics.all_prompts(*self.rounds)):
            if prompt.target is not None:
                to_target[number] = self._likeness(features[number], [prompt.target])
            if prompt.references:
                to_references[number] = self._likeness(features[number], prompt.references)
        values = (to_target, to_references, kept)
        sets = metrics.pictures_by_set(*self.rounds)
        estimates: dict[str, distances.Estimate] = {}
        for name, by_number in zip(metrics.SIMILARITIES, values, strict=True):
            named = {f"{name}/{which}": numbers for which, numbers in sets.items()}
            for key, numbers in {name: [*by_number], **named}.items():
                chosen = [number for number in numbers if number in by_number]
                if chosen:
                    own = np.array([by_number[number] for number in chosen])
                    estimates[key] = distances.mean(own, self._of_pictures(chosen))
        return estimates

    def _likeness(self, features: Float32, places: Sequence[str]) -> float:
        """The mean cosine of a picture's features [D] with those of other pictures."""
        others = np.stack([self.edited[place] for place in places])
        return float(cosine(np.broadcast_to(features, others.shape), others).mean())

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
        "transform": transforms_of(inputs.recipe),
        "factor": factor,
        "split": split,
        "limit": limit,
        **({"left_out": digest_json(sorted(left_out))} if left_out else {}),
    }
    distinct = split == "holdout" and inputs.recipe.encode.leave_out_copies
    facts |= {"distinct": True} if distinct else {}
    parts = inputs.recipe.by_source
    each = limit // len(chosen.by_source)
    pictures: Iterator[Transformed] = chain.from_iterable(
        reference_pictures(
            *(some, TransformSettings.of(parts[source]), factor, split, each, left_out),
            distinct=distinct,
        )
        for source, some in chosen.by_source.items()
    )
    if inputs.recipe.sources:  # one may be like another
        pictures = _once(pictures)
    digests = inputs.measuring.digests()  # its names CLIP and INCEPTION are ours
    digests[IMAGE] = f"whole pictures {digests.get('image_encoder', digests['clip'])}"
    digests[PIXELS] = Pixels.digest

    def tell(done: int) -> None:
        total = max(done, min(limit, count))
        progress(done, total, f"{done:,} of {total:,} {name} pictures measured")

    return reference_features(store, models, digests, facts, pictures, tell)


def _features_of_files(
    files: edits.Files, prompts: Sequence[edits.Prompt], encoder: ImageEncoder
) -> dict[str, Float32]:
    """Place -> features [D] of each reference and target; files of equal content are one."""
    places = {place for p in prompts for place in (*p.references, *filter(None, (p.target,)))}
    by_content = {files[place].sha256: files[place] for place in sorted(places)}
    rows = encoder.images(file.read() for file in by_content.values()) if places else ()
    features = dict(zip(by_content, rows, strict=True))
    return {place: features[files[place].sha256] for place in places}


def _once(pictures: Iterator[Transformed]) -> Iterator[Transformed]:
    """The pictures without those of equal bytes in an earlier source."""
    seen = set[bytes]()
    for path, sample, picture in pictures:
        if sample.source_sha256 not in seen:
            seen.add(sample.source_sha256)
            yield path, sample, picture
