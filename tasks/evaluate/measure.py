"""Measure what a model drew: the same yardstick for base, tuned model and champion."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts.keys import digest_json
from artifacts.latents import open_latents
from artifacts.models import digest_model
from artifacts.store import Artifact, Shard, Store
from configs.schema import Recipe
from runtimes.families.unet_inputs import ExtraInputs
from runtimes.objective.noise import Schedule, schedule_facts
from runtimes.objective.noise_scheduler import read_schedule
from runtimes.pipeline_folder.describe import describe_encoders
from tasks.encode.transform import TransformSettings
from tasks.evaluate import metrics
from tasks.evaluate.features import ClipFeatures, Float32
from tasks.evaluate.judges import JUDGES, ask
from tasks.evaluate.metrics import Metric
from tasks.evaluate.pictures import VERSION, Sitting, read_losses, read_pictures
from tasks.evaluate.prompts import PromptSets, prompt_sets
from tasks.evaluate.reference import reference_pictures

log = logging.getLogger("kiln")
JUDGED_AT_ONCE = 256  # pictures in memory for a judge


@dataclass(frozen=True)
class Yardstick:
    """Everything that two measurements must share to be compared, ready to be held to a model."""

    sets: PromptSets
    compared: tuple[str, ...]  # sets whose pictures are compared with the held-out ones
    judges: tuple[str, ...]
    resamples: int
    seed: int
    clip: ClipFeatures
    text_features: Float32  # [N, D] of every picture's prompt
    reference: Float32  # [M, D] of the held-out pictures; M is 0 when none were held out

    @classmethod
    def of(cls, recipe: Recipe, images: Artifact, latents: Artifact, clip: Path) -> Yardstick:
        sets = prompt_sets(recipe)
        scorer = ClipFeatures(clip, recipe.evaluate.device)
        factor = open_latents(latents.uri).info["size_step"]
        held_out = reference_pictures(images, TransformSettings.of(recipe), factor)
        return cls(
            sets=sets,
            compared=compared_sets(recipe),
            judges=recipe.evaluate.judges,
            resamples=recipe.evaluate.bootstrap,
            seed=recipe.evaluate.seed,
            clip=scorer,
            text_features=scorer.texts(flat(sets)),
            reference=scorer.images(held_out),
        )

    def measure(self, store: Store, drawn: Shard) -> dict[str, Metric]:
        """Every metric of a model's pictures, by name."""
        features = self.clip.images(read_pictures(store, drawn))
        scores = metrics.clip_scores(features, self.text_features)
        found = {"clip_score": metrics.mean(scores, self.resamples, self.seed)}
        for name, part in parts(self.sets).items():
            found[f"clip_score/{name}"] = metrics.mean(scores[part], self.resamples, self.seed)
        like = np.concatenate(
            [features[:0], *(features[parts(self.sets)[n]] for n in self.compared)]
        )
        if min(len(self.reference), len(like)) >= 2:
            for name, distance in metrics.DISTANCES.items():
                found[name] = distance(like, self.reference, self.resamples, self.seed)
        losses = read_losses(store, drawn)
        if len(losses):
            found["holdout_loss"] = metrics.mean(losses, self.resamples, self.seed)
        return found | self._judged(store, drawn)

    def _judged(self, store: Store, drawn: Shard) -> dict[str, Metric]:
        if not self.judges:
            return {}
        verdicts: dict[str, list[NDArray[np.bool_]]] = {}
        prompts, start = flat(self.sets), 0
        for pictures in _stacks(read_pictures(store, drawn)):
            said = ask(self.judges, pictures, prompts[start : start + len(pictures)])
            for name, passed in said.items():
                verdicts.setdefault(name, []).append(passed)
            start += len(pictures)
        return {
            f"{name}/{which}": metrics.share(np.concatenate(passed)[part])
            for name, passed in verdicts.items()
            for which, part in parts(self.sets).items()
        }


def sitting(recipe: Recipe, latents: Artifact) -> Sitting:
    """The conditions that a recipe has its models draw under."""
    given = recipe.evaluate
    has_holdout = open_latents(latents.uri).has_holdout
    if not has_holdout:
        log.warning("evaluate: no picture was held out (encode.holdout): no holdout_loss, cmmd, fd")
    names = (
        "seed",
        "scheduler",
        "num_inference_steps",
        "guidance_scale",
        "aesthetic_score",
        "negative_aesthetic_score",
        "height",
        "width",
        "dtype",
    )
    return Sitting(
        runtime=recipe.runtime,
        device=given.device,
        batch_size=given.batch_size,
        prompts=tuple(flat(prompt_sets(recipe))),
        sampler={name: getattr(given, name) for name in names},
        latents=latents.uri if has_holdout else None,
        latents_digest=latents.digest,
        holdout={
            "samples": given.holdout_samples,
            "draws": given.holdout_draws,
            "seed": given.seed,
            "noise_offset": recipe.train.noise_offset,
        },
        flash_attention=recipe.train.mindspore.flash_attention,
    )


def loss_facts(
    schedule: Schedule, folder: Path, vae: Path | None, extras: ExtraInputs
) -> dict[str, Any]:
    """What a model's held-out loss is the error of: only where it is the same, losses compare."""
    encoders = describe_encoders(folder, vae)
    return {"schedule": schedule_facts(schedule), "encoders": encoders, "sees": vars(extras)}


def fingerprint(
    recipe: Recipe,
    images: Artifact,
    latents: Artifact,
    model_folder: Path,
    vae_folder: Path | None,
    clip: Path,
) -> str:
    """Digest of everything that makes two evaluations comparable, in every metric."""
    schedule = read_schedule(model_folder / "scheduler", recipe.train)
    return digest_json(
        {
            "version": VERSION,
            "sitting": sitting(recipe, latents).facts(),
            "sets": {name: list(prompts) for name, prompts in prompt_sets(recipe).items()},
            "compared": list(compared_sets(recipe)),
            "clip": digest_model(clip),
            "reference": images.digest,
            "transform": vars(TransformSettings.of(recipe)),
            "judges": list(recipe.evaluate.judges),
            "loss": loss_facts(
                schedule, model_folder, vae_folder, ExtraInputs.from_settings(recipe.train)
            ),
        }
    )


def metric_names(recipe: Recipe, *, held_out: bool = True) -> list[str]:
    """Names of the metrics that an evaluation of this recipe has.

    Args:
        held_out: the recipe's encode.holdout, if any, has held out pictures.
    """
    sets = list(recipe.evaluate.prompts)
    names = ["clip_score", *(f"clip_score/{name}" for name in sets)]
    if recipe.encode.holdout > 0 and held_out:
        names += [*(metrics.DISTANCES if compared_sets(recipe) else ()), "holdout_loss"]
    verdicts = [verdict for judge in recipe.evaluate.judges for verdict in JUDGES[judge].verdicts]
    return names + [f"{verdict}/{name}" for verdict in verdicts for name in sets]


def compared_sets(recipe: Recipe) -> tuple[str, ...]:
    """Names of the prompt sets whose pictures are compared with the held-out ones."""
    return tuple(name for name, given in recipe.evaluate.prompts.items() if given.compare)


def flatten(measured: dict[str, dict[str, Metric]]) -> dict[str, dict[str, float]]:
    """Metric name -> model -> value: what the gate looks at."""
    return {
        name: {model: found["value"] for model, found in models.items()}
        for name, models in measured.items()
    }


def flat(sets: PromptSets) -> list[str]:
    """The prompt of every picture, set after set."""
    return [prompt for prompts in sets.values() for prompt in prompts]


def parts(sets: PromptSets) -> dict[str, slice]:
    """Which pictures belong to each prompt set."""
    found, start = {}, 0
    for name, prompts in sets.items():
        found[name] = slice(start, start + len(prompts))
        start += len(prompts)
    return found


def _stacks(pictures: Iterator[NDArray[np.uint8]]) -> Iterator[NDArray[np.uint8]]:
    """Pictures as arrays [B, H, W, 3]."""
    waiting: list[NDArray[np.uint8]] = []
    for picture in pictures:
        waiting.append(picture)
        if len(waiting) == JUDGED_AT_ONCE:
            yield np.stack(waiting)
            waiting = []
    if waiting:
        yield np.stack(waiting)


def as_rows(
    measured: dict[str, dict[str, Metric]], models: Sequence[str] = ("base", "tuned")
) -> list[dict[str, Any]]:
    """Metrics as table rows: values, intervals, and how many samples are behind them."""
    rows = []
    for name, found in measured.items():
        row: dict[str, Any] = {"metric": name}
        for model in models:
            one = found[model]
            row[model] = one["value"]
            row[f"{model}, 95%"] = "{:.4g} to {:.4g}".format(*one["ci"])
        rows.append({**row, "n": found[models[0]]["n"]})
    return rows
