"""The train stage: latent shards in, fine-tuned weights out, by a runtime in its own process."""

from __future__ import annotations

import fractions
import json
import logging
from pathlib import Path
from typing import Any

from artifacts.filesystems import matching
from artifacts.latent_shards import open_latents
from artifacts.models import digest_model
from artifacts.store import Artifact, Draft, KeyParts
from configs.settings.recipe import Recipe
from configs.settings.train import Train, key_settings
from runtimes.contract import WrongInput
from runtimes.families import detect_family
from runtimes.pipeline_folder.folder import replacement_config
from runtimes.process.job import TrainJob
from tasks.build_or_reuse import runtime_facts
from tasks.child_process import run_job
from tasks.copy_checkpoint import copy_checkpoint
from tasks.evaluate.draw_pictures import sampler_settings
from tasks.evaluate.prompts import sample_prompts
from tasks.evaluate.score_training_samples import SampleScorer, sample_metrics
from tasks.panels import Chart, Facts, Panel, Strip, Table
from tasks.panels_charts import loss_chart
from tasks.progress import Progress
from tasks.tpu import launch
from tasks.training_events import FIGURES, Watch

STAGE = "train"
VERSION = 2
SAMPLES_SHOWN = 24
log = logging.getLogger("kiln")


def settings_for_key(recipe: Recipe) -> dict[str, Any]:
    """The settings that affect the trained weights.

    The runtime and the settings of the execution are excluded: a resume may change them.
    """
    settings = key_settings(recipe.train)
    if (config := replacement_config(recipe.train)) is not None:  # the content, not the path
        settings["denoiser_config"] = config
    rule = recipe.train.best_checkpoint
    if rule is not None and rule.by_samples:  # these settings affect the scores
        settings["best_checkpoint"] |= {
            **sampler_settings(recipe.evaluate),
            "scores": sample_metrics(recipe.evaluate.judges),
            "prompts": [*sample_prompts(recipe)],
        }
    return settings


def key_parts(
    recipe: Recipe,
    latents: Artifact,
    model_folder: Path,
    clip: Path,
    start: Artifact | None = None,
    holdout: Artifact | None = None,
) -> KeyParts:
    """The artifact's key: settings, latents, the weights of the base in training, and the start.

    Args:
        clip: folder of the CLIP model; its weights count if scores choose the checkpoint.
        start: train artifact whose weights training continues from; None: the base's.
        holdout: latents with the held-out samples, which count if their loss chooses the
            checkpoint; None: `latents`.
    """
    family, base = detect_family(model_folder), digest_base(recipe, model_folder)
    settings = settings_for_key(recipe) | family.key_facts
    inputs = {"latents": latents.digest, "base": base}
    if start is not None:
        inputs["start"] = start.digest
    rule = recipe.train.best_checkpoint
    if rule is not None and rule.by_samples:
        inputs["clip"] = digest_model(clip)
    elif rule is not None and holdout is not None:
        inputs["holdout"] = holdout.digest
    if recipe.encode.text_dtype is not None and not recipe.train.train_text_encoder:
        inputs["text_encoders"] = digest_model(model_folder, family.clip_encoders)
    return KeyParts(STAGE, VERSION, settings, inputs)


def digest_base(recipe: Recipe, model_folder: Path) -> str:
    """sha256 (hex) of the base's parts in training, and of its scheduler."""
    family = detect_family(model_folder)
    texts = family.clip_encoders if recipe.train.train_text_encoder else ()
    return digest_model(model_folder, (family.denoiser, "scheduler", *texts))


def build(
    recipe: Recipe,
    latents: Artifact,
    model_folder: Path,
    vae_folder: Path | None,
    clip: Path | None,
    draft: Draft,
    progress: Progress,
    *,
    adapters: str | None = None,
    holdout: Artifact | None = None,
) -> dict[str, Any]:
    """Train in the draft's folder.

    Training resumes from a checkpoint there, or of a run that differs only in its steps.

    Args:
        clip: folder of the CLIP model that scores sample pictures; None: none are drawn.
        adapters: URL of the LoRA file with the weights of step 0; None: new adapters.
        holdout: latents with the held-out samples; None: `latents`.
    """
    settings = settings_for(recipe.train, open_latents(latents.uri).training)
    if not settings.weights_depend_on_steps:
        copy_checkpoint(draft, settings)
    prompts = () if clip is None else sample_prompts(recipe)
    score = None if clip is None else SampleScorer(recipe.evaluate.judges, clip, prompts)
    job = TrainJob(
        runtime=recipe.runtime,
        model=str(model_folder),
        vae=None if vae_folder is None else str(vae_folder),
        latents=latents.uri,
        train=settings.model_dump(mode="json"),
        work=draft.uri,
        out=draft.uri,
        sample_prompts=prompts,
        sampler=sampler_settings(recipe.evaluate, "batch_size"),
        denoiser_config=replacement_config(recipe.train),
        compiled=draft.store.compiled_url,
        adapters=adapters,
        holdout=None if holdout is None else holdout.uri,
        text_dtype=recipe.encode.text_dtype,
        claim=None if draft.lock is None else draft.lock.claim,
    )
    watch = Watch(progress, draft.store.fs, score)
    grace = recipe.train.grace_seconds
    if recipe.tpu is None:
        run_job(job, watch, grace_seconds=grace)
    else:
        launch.run_on_slice(recipe.tpu, job, watch, store=draft.store, grace_seconds=grace)
    for file in watch.files:
        draft.add(file)
    history = _history(draft.read("history.jsonl"))
    here = recipe.tpu is None
    run = (runtime_facts(recipe.runtime) if here else {"runtime": recipe.runtime}) | watch.facts
    if scores := watch.all_scores(f"{draft.path}/samples"):
        run["sample_scores"] = scores
    return _summary(recipe, history, watch.chosen) | {"run": run}


def settings_for(given: Train, samples: int) -> Train:
    """The settings with `epochs` converted to `steps`.

    Raises:
        WrongInput: the samples are not enough for one step, or for the profiler's trace.
    """
    if given.epochs is None:
        return given
    check_epochs(given, samples)
    settings = given.with_steps(samples)
    warn_of_warmup(settings)
    return settings


def check_epochs(settings: Train, samples: int, noun: str = "training samples") -> None:
    """Raise WrongInput if `samples` are not enough for one step, or for the profiler's trace.

    Args:
        samples: those that will be trained on, or more.
    """
    epochs, batch, profile = settings.epochs, settings.global_batch_size, settings.profile
    if epochs is None:
        return
    if samples == 0:
        raise WrongInput("there are no training samples: add pictures, or lower encode.holdout")
    if fractions.Fraction(str(epochs)) * samples < batch:  # as `with_steps`
        raise WrongInput(
            f"train.epochs: {epochs:g} of {samples:,} {noun} are less than one step of "
            f"global_batch_size {batch}: raise train.epochs"
        )
    steps, last = settings.with_steps(samples).steps, profile.start + profile.steps
    if profile.steps and last > steps:
        raise WrongInput(
            f"train.epochs: {epochs:g} of {samples:,} {noun} are {steps:,} steps: train.profile "
            f"traces steps {profile.start:,} to {last:,}: lower train.profile.start or "
            "train.profile.steps"
        )


def warn_of_warmup(settings: Train) -> None:
    """Warn of a warm-up that does not end; without `steps` the run is too early to tell."""
    warmup, steps = settings.lr_warmup_steps, settings.steps
    if settings.epochs is None and warmup > steps:
        words = "train.lr_warmup_steps: %d exceed the %d steps: the learning rate misses its peak"
        log.warning(words, warmup, steps)


def _summary(
    recipe: Recipe, history: list[dict[str, Any]], chosen: dict[str, Any]
) -> dict[str, Any]:
    until = history[: chosen.get("chosen_step", len(history))]  # losses of the published weights
    tail = [line["loss"] for line in until[-max(1, len(until) // 10) :]]
    validated = [line for line in until if "validation_loss" in line]
    left_out = sum(len(line.get("skipped", ())) for line in history)
    return {
        "steps": len(history),
        "samples_seen": len(history) * recipe.train.global_batch_size,
        "loss_last_tenth": sum(tail) / len(tail),
        **({"validation_loss": validated[-1]["validation_loss"]} if validated else {}),
        **({"batches_left_out": left_out} if left_out else {}),
        **chosen,
    }


def show(artifact: Artifact) -> list[Panel]:
    """The loss curve, the samples over training, and the figures of the run."""
    history = _history(artifact.read("history.jsonl"))
    run = artifact.manifest["run"]
    kept = ("runtime", "device", *FIGURES, "seconds")
    facts = {name.replace("_", " "): run[name] for name in kept if run.get(name) is not None}
    facts["TensorBoard"] = f"{artifact.uri}/tensorboard"
    chosen = artifact.summary.get("chosen_step")
    panels: list[Panel] = [
        Facts("Run", {name.replace("_", " "): v for name, v in artifact.summary.items()} | facts),
        Chart("Loss", loss_chart(history, chosen)),
    ]
    if samples := _samples(artifact, chosen):
        panels.append(Strip("Samples while training", samples))
    if scores := run.get("sample_scores"):
        panels.append(Table("Scores of the samples", scores))
    return panels


def _history(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line]


def _samples(artifact: Artifact, chosen: int | None) -> list[tuple[str, bytes]]:
    """(step, PNG) of some sample pictures: the first, the last, and those of the chosen step."""
    fs, folder = artifact.store.fs, f"{artifact.path}/samples"
    paths = matching(fs, folder, "*.png")
    steps = [int(Path(path).stem.removeprefix("step-")) for path in paths]
    shown = {round(n * (len(paths) - 1) / (SAMPLES_SHOWN - 1)) for n in range(SAMPLES_SHOWN)}
    if chosen in steps:
        shown.add(steps.index(chosen))
    return [
        (f"step {step}" + (", chosen" if step == chosen else ""), bytes(fs.cat_file(path)))
        for number, (step, path) in enumerate(zip(steps, paths, strict=True))
        if number in shown
    ]
