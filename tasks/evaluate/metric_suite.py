"""Metrics of a model's pictures, computed alike for the base, the tuned model and the champion."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts.digests import digest_json
from artifacts.latent_shards import open_latents
from artifacts.resolve_model import digest_model
from artifacts.store import Shard, Store
from configs.recipe import Recipe
from runtimes.families.unet_inputs import ExtraInputs
from runtimes.objective.noise_schedule import Schedule, schedule_facts
from runtimes.objective.scheduler_config import read_schedule
from runtimes.pipeline_folder.describe_encoders import describe_encoders
from tasks.encode.decode_and_crop import TransformSettings
from tasks.evaluate import metrics
from tasks.evaluate.clip_features import ClipFeatures, Float32, batches
from tasks.evaluate.draw_pictures import (
    SAMPLER_SETTINGS,
    VERSION,
    SamplingSpec,
    read_losses,
    read_pictures,
)
from tasks.evaluate.inputs import EvalInputs
from tasks.evaluate.judges import JUDGES, judge_pictures
from tasks.evaluate.metrics import Metric
from tasks.evaluate.prompts import PromptSets, prompt_sets
from tasks.evaluate.reference_pictures import reference_pictures
from tasks.panels import human

log = logging.getLogger("kiln")
JUDGE_BATCH = 256  # pictures in memory per call of a judge


@dataclass(frozen=True)
class MetricSuite:
    """The metrics of an evaluation, with the references that comparable measurements share."""

    sets: PromptSets
    compared: tuple[str, ...]  # prompt sets whose pictures `cmmd` and `fd` compare
    judges: tuple[str, ...]  # names in JUDGES
    resamples: int  # bootstrap resamples per interval
    seed: int  # of the bootstrap
    clip: ClipFeatures
    text_features: Float32  # [N, D], one row per picture
    reference: Float32  # [M, D] of the held-out pictures; M = 0 without a held-out split

    @classmethod
    def of(cls, given: EvalInputs) -> MetricSuite:
        """The metrics of a recipe. Raises WrongInput if the CLIP model fails to load."""
        recipe, sets = given.recipe, prompt_sets(given.recipe)
        scorer = ClipFeatures(given.clip, recipe.evaluate.device)
        factor = open_latents(given.latents.uri).info["size_step"]
        held_out = reference_pictures(given.images, TransformSettings.of(recipe), factor)
        return cls(
            sets=sets,
            compared=compared_sets(recipe),
            judges=recipe.evaluate.judges,
            resamples=recipe.evaluate.bootstrap,
            seed=recipe.evaluate.seed,
            clip=scorer,
            text_features=scorer.texts(all_prompts(sets)),
            reference=scorer.images(held_out),
        )

    def measure(self, store: Store, drawn: Shard) -> dict[str, Metric]:
        """Metric name -> metric of the pictures in a shard of `draw`."""
        features = self.clip.images(read_pictures(store, drawn))
        scores = metrics.clip_scores(features, self.text_features)
        found = {"clip_score": metrics.mean(scores, self.resamples, self.seed)}
        for name, part in slices_by_set(self.sets).items():
            found[f"clip_score/{name}"] = metrics.mean(scores[part], self.resamples, self.seed)
        compared = np.concatenate(
            [features[:0], *(features[slices_by_set(self.sets)[n]] for n in self.compared)]
        )
        if min(len(self.reference), len(compared)) >= 2:
            for name, distance in metrics.DISTANCES.items():
                found[name] = distance(compared, self.reference, self.resamples, self.seed)
        losses = read_losses(store, drawn)
        if len(losses):
            found["holdout_loss"] = metrics.mean(losses, self.resamples, self.seed)
        return found | self._judged(store, drawn)

    def _judged(self, store: Store, drawn: Shard) -> dict[str, Metric]:
        if not self.judges:
            return {}
        verdicts: dict[str, list[NDArray[np.bool_]]] = {}
        prompts, start = all_prompts(self.sets), 0
        for pictures in batches(read_pictures(store, drawn), JUDGE_BATCH):
            given = prompts[start : start + len(pictures)]
            batch = judge_pictures(self.judges, np.stack(pictures), given)
            for name, passed in batch.items():
                verdicts.setdefault(name, []).append(passed)
            start += len(pictures)
        return {
            f"{name}/{which}": metrics.share(np.concatenate(passed)[part])
            for name, passed in verdicts.items()
            for which, part in slices_by_set(self.sets).items()
        }


def sampling_spec(given: EvalInputs) -> SamplingSpec:
    """The sampling settings of an evaluation, equal for all models."""
    recipe, latents, settings = given.recipe, given.latents, given.recipe.evaluate
    has_holdout = open_latents(latents.uri).has_holdout
    if not has_holdout:
        log.warning("evaluate: no held-out picture (encode.holdout): no holdout_loss, cmmd, fd")
    return SamplingSpec(
        runtime=recipe.runtime,
        device=settings.device,
        batch_size=settings.batch_size,
        prompts=tuple(all_prompts(prompt_sets(recipe))),
        sampler=settings.model_dump(mode="json", include=SAMPLER_SETTINGS | {"dtype"}),
        latents=latents.uri if has_holdout else None,
        latents_digest=latents.digest,
        holdout={
            "samples": settings.holdout_samples,
            "draws": settings.holdout_draws,
            "seed": settings.seed,
            "noise_offset": recipe.train.noise_offset,
        },
        flash_attention=recipe.train.mindspore.flash_attention,
    )


def loss_facts(
    schedule: Schedule, folder: Path, vae: Path | None, extras: ExtraInputs
) -> dict[str, Any]:
    """The facts that define a held-out loss; losses are comparable only if they are equal."""
    encoders = describe_encoders(folder, vae)
    return {"schedule": schedule_facts(schedule), "encoders": encoders, "sees": vars(extras)}


def fingerprint(given: EvalInputs) -> str:
    """sha256 of all facts that two evaluations must share for comparable metrics."""
    recipe = given.recipe
    schedule = read_schedule(given.base / "scheduler", recipe.train)
    extras = ExtraInputs.from_settings(recipe.train)
    return digest_json(
        {
            "version": VERSION,
            "sampling": sampling_spec(given).facts(),
            "sets": {name: list(prompts) for name, prompts in prompt_sets(recipe).items()},
            "compared": list(compared_sets(recipe)),
            "clip": digest_model(given.clip),
            "reference": given.images.digest,
            "transform": vars(TransformSettings.of(recipe)),
            "judges": list(recipe.evaluate.judges),
            "loss": loss_facts(schedule, given.base, given.vae, extras),
        }
    )


def metric_names(recipe: Recipe, *, held_out: bool = True) -> list[str]:
    """Names of the metrics that this recipe's evaluation computes.

    Args:
        held_out: whether a nonzero `encode.holdout` selects at least one picture.
    """
    sets = list(recipe.evaluate.prompts)
    names = ["clip_score", *(f"clip_score/{name}" for name in sets)]
    if recipe.encode.holdout > 0 and held_out:
        names += [*(metrics.DISTANCES if compared_sets(recipe) else ()), "holdout_loss"]
    verdicts = [verdict for judge in recipe.evaluate.judges for verdict in JUDGES[judge].verdicts]
    return names + [f"{verdict}/{name}" for verdict in verdicts for name in sets]


def compared_sets(recipe: Recipe) -> tuple[str, ...]:
    """Names of the prompt sets whose pictures `cmmd` and `fd` compare with held-out ones."""
    return tuple(name for name, given in recipe.evaluate.prompts.items() if given.compare)


def flatten(measured: dict[str, dict[str, Metric]]) -> dict[str, dict[str, float]]:
    """Metric name -> model name -> value, as the gate's rules read it."""
    return {
        name: {model: found["value"] for model, found in models.items()}
        for name, models in measured.items()
    }


def all_prompts(sets: PromptSets) -> list[str]:
    """The prompt of every picture, in the order of the sets."""
    return [prompt for prompts in sets.values() for prompt in prompts]


def slices_by_set(sets: PromptSets) -> dict[str, slice]:
    """Prompt set name -> the slice of its pictures in `all_prompts`."""
    found, start = {}, 0
    for name, prompts in sets.items():
        found[name] = slice(start, start + len(prompts))
        start += len(prompts)
    return found


def metric_rows(metrics: dict[str, dict[str, Metric]]) -> list[dict[str, Any]]:
    """Table rows, one per metric: base and tuned value with 95% interval, and the sample count."""
    return [
        {
            "metric": name,
            **{model: _with_interval(models.get(model)) for model in ("base", "tuned")},
            "samples": models["tuned"]["n"],
        }
        for name, models in metrics.items()
    ]


def _with_interval(metric: Metric | None) -> str:
    if metric is None:
        return "—"
    low, high = metric["ci"]
    return f"{human(float(metric['value']))} [{human(float(low))}, {human(float(high))}]"
