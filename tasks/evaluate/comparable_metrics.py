"""What two evaluations must share for comparable metrics: sampling settings, data and models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from artifacts.latent_shards import open_latents
from artifacts.records import digest_json
from runtimes.families import detect_family
from runtimes.families.extra_inputs import ExtraInputs
from runtimes.objective.noise_schedule import Schedule, read_schedule, schedule_facts
from runtimes.pipeline_folder.folder import describe_encoders
from tasks.encode.decode_and_crop import TransformSettings
from tasks.evaluate.draw_pictures import EvalModel, SamplingSpec, sampler_settings
from tasks.evaluate.evaluation_inputs import EvalInputs
from tasks.evaluate.holdout_loss import LEVELS
from tasks.evaluate.judges import judge_names
from tasks.evaluate.metric_names import all_prompts, compared_sets
from tasks.evaluate.prompts import prompt_sets

#: Increment when the pictures, the definition of a metric, or its interval changes.
VERSION = 5


def sampling_spec(given: EvalInputs) -> SamplingSpec:
    """The sampling settings of an evaluation, equal for all models."""
    recipe, latents, settings = given.recipe, given.latents, given.recipe.evaluate
    has_holdout = open_latents(latents.uri).held_out > 0
    return SamplingSpec(
        runtime=recipe.runtime,
        device=settings.device,
        batch_size=settings.batch_size,
        prompts=tuple(all_prompts(prompt_sets(recipe))),
        sampler=sampler_settings(settings, "dtype"),
        latents=latents.uri if has_holdout else None,
        latents_digest=latents.digest,
        holdout={
            "samples": settings.holdout_samples,
            "levels": LEVELS,
            "seed": settings.seed,
            **recipe.train.holdout_loss_inputs,
        },
        family_facts=detect_family(given.base).key_facts,
        text_dtype=recipe.encode.text_dtype if has_holdout else None,
        flash_attention=recipe.train.mindspore.flash_attention,
        offload=settings.offload,
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
            "models": given.measuring.digests(),
            "reference": given.images.digest,
            "transform": TransformSettings.of(recipe).for_key(),
            "judges": judge_names(recipe.evaluate.judges),
            "memorization": recipe.evaluate.memorization.model_dump(mode="json"),
            "bootstrap": recipe.evaluate.bootstrap,
            "loss": loss_facts(schedule, given.base, given.vae, extras),
        }
    )


def same_loss(given: EvalInputs, model: EvalModel) -> bool:
    """Whether a model has the prediction and the inputs of the model in training."""
    theirs = read_schedule(model.part("scheduler"))
    ours = read_schedule(given.base / "scheduler", given.recipe.train)
    return loss_facts(theirs, model.folder, model.vae, model.extras) == loss_facts(
        ours, given.base, given.vae, ExtraInputs.from_settings(given.recipe.train)
    )
