"""Everything that can be found wrong with a recipe before work starts, or before training does."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from artifacts.latents import Latents
from artifacts.models import ModelNotFound, resolve_model
from artifacts.store import Artifact, KeyParts, Store
from configs.load import RecipeError, dump
from configs.schema import STAGES, Recipe, StageName
from flows.stages import begin
from runtimes import registry
from runtimes.families import detect_family
from runtimes.families.unet_inputs import ExtraInputs
from runtimes.objective.latent_scale import LatentScale
from runtimes.objective.objective import Objective
from runtimes.objective.scheduler_config import read_config, read_schedule, trained_scheduler
from runtimes.pipeline_folder.denoiser_config import folder_extras
from runtimes.pipeline_folder.describe import describe_encoders, vae_path
from runtimes.train.wandb_board import check_wandb
from tasks import check_targets, download
from tasks.encode.buckets import bucket_sizes
from tasks.encode.transform import TransformSettings
from tasks.evaluate import stage as evaluate
from tasks.evaluate.features import check_clip
from tasks.evaluate.inputs import EvalInputs
from tasks.evaluate.measure import metric_names
from tasks.progress import Progress
from tasks.publish.assemble import missing_weights
from tasks.publish.gate import check_rules, parse_rule
from tasks.stage import storage_error
from tasks.tpu import launch


@dataclass(frozen=True)
class Run:
    """A run of a recipe: its store is writable, and its models are on this machine."""

    recipe: Recipe
    store: Store
    base: Path  # the pipeline folder of the model that is tuned
    vae: Path | None
    clip: Path
    id: str  # of the flow run

    @property
    def model_name(self) -> str:
        """Of the model that is made, in the registry and in Prefect."""
        return self.recipe.publish.name

    def eval_inputs(self, images: Artifact, latents: Artifact) -> EvalInputs:
        """The inputs of an evaluation."""
        return EvalInputs(self.recipe, images, latents, self.base, self.vae, self.clip)

    def begin(self, parts: KeyParts) -> Progress:
        """Record that this run needs a stage; returns the progress of building it."""
        return begin(self.store, self.id, parts, self.model_name, {"recipe": dump(self.recipe)})


def prepare(recipe: Recipe, *, until: StageName = "publish", run_id: str | None = None) -> Run:
    """Check a recipe against the world; devices and watchers only of stages up to `until`.

    Raises a ValueError of ours (RecipeError, GateError, ModelNotFound, SourceError, WrongInput)
    with one clear line.
    """
    check_rules(recipe.publish.gate, metric_names(recipe))
    store = _check_places(recipe)
    stages = STAGES[: 1 + STAGES.index(until)]
    _check_runtime(recipe, stages)
    if "train" in stages:
        if recipe.tpu is not None:
            launch.check(recipe.tpu, recipe.store, recipe.train.wandb)
        _check_watching(recipe)
    download.check(recipe)
    evaluate.check(recipe)
    if recipe.beam:
        from tasks.beam import check_options  # seconds to import

        check_options(recipe.beam)
    model, vae = _check_models(recipe)
    clip = resolve_model(recipe.evaluate.clip)
    check_clip(clip)
    return Run(recipe, store, model, vae, clip, run_id or str(uuid.uuid4()))


def check_gate(recipe: Recipe, latents: Latents) -> None:
    """Raise GateError for rules that could not be held against a model trained on these latents."""
    hint = (
        f"encode.holdout {recipe.encode.holdout:g} has held out none of these few pictures: raise "
        "it, or leave the rule out"
    )
    known = metric_names(recipe, held_out=latents.has_holdout)
    check_rules(recipe.publish.gate, known, hint)


def _check_places(recipe: Recipe) -> Store:
    store = Store(recipe.store)
    other = recipe.publish.registry
    for place in [store] if other is None else [store, Store(other)]:
        try:
            place.check_writable()
        except Exception as error:
            told = storage_error(place, error)
            if told is error and not isinstance(error, OSError):
                raise
            raise RecipeError(f"store: {told}") from error
    return store


def _check_runtime(recipe: Recipe, stages: Sequence[StageName]) -> None:
    if "encode" not in stages:
        return
    registry.check_installed(recipe.runtime)
    computing = [stage for stage in stages if stage in ("encode", "train", "evaluate")]
    asked = {f"{stage}.device": getattr(recipe, stage).device for stage in computing}
    settings = recipe.train
    several = settings.processes > 1 and settings.device != "cpu"
    other = recipe.runtime != "torch"  # with settings of its own that it refuses
    unsure = several or settings.optimizer == "adamw_8bit" or other
    if set(asked.values()) <= {"auto", "cpu"} and not unsure:
        return  # always there; looking for others imports the runtime, which takes seconds
    registry.check_devices(recipe.runtime, asked)
    if "train" in stages:
        registry.check_settings(recipe.runtime, settings)


def _check_watching(recipe: Recipe) -> None:
    """Raise for what training is to be watched by, and cannot be."""
    check_wandb(recipe.train.wandb)
    if recipe.train.holdout_loss.every_n_steps and not recipe.encode.holdout:
        raise RecipeError("train.holdout_loss needs held-out samples: raise encode.holdout")


def _check_models(recipe: Recipe) -> tuple[Path, Path | None]:
    """The base's folder and, if the recipe names one, another VAE's."""
    model = resolve_model(recipe.model.path, revision=recipe.model.revision)
    vae = resolve_model(recipe.model.vae) if recipe.model.vae else None
    # Raises for a folder of another family, or without its configs.
    found = describe_encoders(model, vae)
    registry.check_family(recipe.runtime, found["family"])
    factor = found["size_step"]
    bucket_sizes(TransformSettings.of(recipe), factor)
    evaluate.check_size(recipe, model, vae)
    _check_weights(model, vae)
    _check_objective(recipe, model)
    registry.check_scheduler(
        recipe.runtime, read_config(model / "scheduler"), recipe.evaluate.scheduler
    )
    check_targets.check(recipe, model)
    return model, None if vae is None else vae_path(model, vae)


def _check_weights(model: Path, vae: Path | None) -> None:
    missing = [part for part in missing_weights(model) if part != "vae" or vae is None]
    if missing:
        raise ModelNotFound(f"model {model}: no .safetensors weights in {', '.join(missing)}")


def _check_objective(recipe: Recipe, model: Path) -> None:
    """Raise WrongInput for train settings that do not go with the base or with each other."""
    folder = model / "scheduler"
    Objective.of(recipe.train, read_schedule(folder, recipe.train), LatentScale(1.0))
    if recipe.encode.holdout:  # evaluation takes the base's loss too
        Objective(read_schedule(folder), LatentScale(1.0), seed=0)
    denoiser = model / detect_family(model).denoiser
    if trained_scheduler(folder, recipe.train) is not None:
        why = "errors of different predictions, as train.prediction_type or train.zero_terminal_snr"
    elif folder_extras(denoiser) != ExtraInputs.from_settings(recipe.train):
        why = "models that see different things, as train.inpainting or train.aesthetic_score"
    else:
        return
    for rule in map(parse_rule, recipe.publish.gate):
        if (rule.metric, rule.model) == ("holdout_loss", "base"):
            raise RecipeError(
                f"publish.gate: {rule.text!r} compares {why} is not the base's: leave it out"
            )
