"""Checks of a recipe's models before the first stage: the base, its VAE, and those that measure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from artifacts.models import (
    ModelAway,
    ModelNotFound,
    check_on_hub,
    local_model,
    resolve_file,
    resolve_model,
)
from configs.load_recipe import RecipeError
from configs.settings.recipe import Recipe, StageName
from configs.settings.train_parts import HOLDOUT_LOSS
from runtimes import registry
from runtimes.contract import WrongInput
from runtimes.families import detect_family
from runtimes.families.extra_inputs import ExtraInputs
from runtimes.objective.noise_schedule import (
    ResolutionShift,
    read_schedule,
    read_scheduler_config,
    schedule_facts,
    scheduler_config,
)
from runtimes.objective.training_objective import LatentScale, Objective
from runtimes.pipeline_folder.folder import (
    describe_encoders,
    folder_extras,
    read_denoiser_config,
    read_part_config,
    replacement_config,
    vae_path,
)
from runtimes.pipeline_folder.weights import check_tokenizers, check_weights, stored_weight_files
from tasks import train
from tasks.encode.transform import TransformSettings, bucket_sizes
from tasks.evaluate import stage as evaluate
from tasks.evaluate.features import check_clip, check_image_encoder
from tasks.evaluate.inception import check_inception
from tasks.evaluate.inputs import MeasuringModels
from tasks.publish.assemble import model_parts
from tasks.publish.promotion_gate import parse_rule


def check_models(recipe: Recipe) -> tuple[Path, Path | None]:
    """Check the models; returns the base's folder and that of a separate VAE, if any."""
    model = _resolved("model.path", recipe.model.path, recipe.model.revision)
    vae = _resolved("model.vae", recipe.model.vae) if recipe.model.vae else None
    with _naming("model.path" if vae is None else "model.path or model.vae"):
        found = describe_encoders(model, vae)
    for device in (recipe.train.device, recipe.evaluate.device):
        registry.check_family(recipe.runtime, found["family"], device)
    factor = found["size_step"]
    largest = max(map(max, bucket_sizes(TransformSettings.of(recipe), factor)))
    _check_position_embeddings(recipe, model, largest, factor)
    evaluate.check_drawn_size(recipe, model, vae)
    _check_weights(model, vae)
    check_tokenizers(model)
    _check_objective(recipe, model)
    _check_schedulers(recipe, model)
    train.check(recipe, model)
    return model, None if vae is None else vae_path(model, vae)


def _check_position_embeddings(recipe: Recipe, model: Path, largest: int, factor: int) -> None:
    """Raise RecipeError for pictures whose sides exceed a denoiser's table of positions (SD3).

    Args:
        largest: the longest side of a bucket, in pixels.
        factor: pixels per position.
    """
    settings, drawn = recipe.train, recipe.evaluate
    base, instead = read_denoiser_config(model), replacement_config(settings)
    trained = base if instead is None else instead
    draws = max(drawn.height or 0, drawn.width or 0)
    checks = [("encode.resolution", largest, trained), ("evaluate.height and width", draws, base)]
    for setting, side, config in [*checks, ("evaluate.height and width", draws, trained)]:
        most = config.get("pos_embed_max_size")
        if most is not None and side > most * factor:
            raise RecipeError(
                f"{setting}: sides of {side} pixels exceed the {most * factor} of the model's "
                "position embeddings: lower them, or encode.max_aspect"
            )


def _check_weights(model: Path, vae: Path | None) -> None:
    """Raise ModelNotFound or WrongInput for weights that are missing, damaged or others."""
    parts = [part for part in model_parts(model) if part.name != "vae" or vae is None]
    missing = [part.name for part in parts if not stored_weight_files(part)]
    if missing:
        raise ModelNotFound(
            f"model.path {model}: no .safetensors weights in {', '.join(missing)}: fetch them, or "
            "convert other files"
        )
    if vae is not None and not stored_weight_files(folder := vae_path(model, vae)):
        raise ModelNotFound(f"model.vae {folder}: it has no .safetensors weights")
    for part in parts if vae is None else [*parts, vae_path(model, vae)]:
        check_weights(part)


def _check_objective(recipe: Recipe, model: Path) -> None:
    """Raise WrongInput for train settings that contradict the base or each other."""
    folder, family = model / "scheduler", detect_family(model)
    denoiser = model / family.denoiser
    patch = family.latent_multiple(read_part_config(model, family.denoiser))
    shift = ResolutionShift.from_config(read_scheduler_config(folder), patch)
    Objective.of(recipe.train, read_schedule(folder, recipe.train), LatentScale(1.0), shift)
    if recipe.encode.holdout:  # evaluation computes the base's loss
        Objective(read_schedule(folder), LatentScale(1.0), seed=0)
    base, tuned = (read_schedule(folder, settings) for settings in (None, recipe.train))
    if schedule_facts(base) != schedule_facts(tuned):
        why = "the scheduler (train.prediction_type or train.zero_terminal_snr)"
    elif folder_extras(denoiser) != ExtraInputs.from_settings(recipe.train):
        why = "the inputs (train.inpainting or train.aesthetic_score)"
    else:
        return
    for rule in map(parse_rule, recipe.publish.gate):
        if rule.metric.startswith(HOLDOUT_LOSS) and rule.model == "base":
            raise RecipeError(
                f"publish.gate: {rule.text!r} compares incomparable losses, since {why} "
                "of the tuned model differ from the base's: remove the rule"
            )


def _check_schedulers(recipe: Recipe, model: Path) -> None:
    """Raise WrongInput for a scheduler that cannot draw the base or the tuned model."""
    own, drawn = read_scheduler_config(model / "scheduler"), recipe.evaluate
    for config in (own, scheduler_config(own, recipe.train)):
        registry.check_scheduler(recipe.runtime, config, drawn.scheduler, drawn.num_inference_steps)


def check_measuring_models(recipe: Recipe, stages: Sequence[StageName]) -> MeasuringModels:
    """Check the models that measure pictures, and find their local copies."""
    inception, named = None, recipe.evaluate.inception
    folders = _check_measuring_folders(recipe)
    if named is not None:
        with _naming("evaluate.inception"):
            inception = resolve_file(named)
        if "evaluate" in stages:
            check_inception(inception, named)
    return MeasuringModels(*folders, inception)


def _check_measuring_folders(recipe: Recipe) -> tuple[Path, Path | None, dict[str, Path]]:
    """The folders of the CLIP model, of the image encoder and of the judges, checked."""
    settings = recipe.evaluate
    clip, encoder = _resolved("evaluate.clip", settings.clip), None
    check_clip(clip)
    if settings.image_encoder is not None:
        encoder = _resolved("evaluate.image_encoder", settings.image_encoder)
        check_image_encoder(encoder)
    judges = {
        name: _resolved(f"evaluate.judges.{name}", path)
        for name, path in settings.preference_models.items()
    }
    for name, folder in judges.items():
        check_clip(folder, f"evaluate.judges.{name}")
    return clip, encoder, judges


def check_local_models(recipe: Recipe) -> None:
    """As the checks above, of the models that need not be fetched first; others must exist."""
    here = {setting: _is_here(setting, *place) for setting, place in _models_of(recipe).items()}
    if all(found for setting, found in here.items() if setting.startswith("model.")):
        check_models(recipe)
    if all(found for setting, found in here.items() if setting.startswith("evaluate.")):
        _check_measuring_folders(recipe)
    if (inception := recipe.evaluate.inception) is not None and "://" not in inception:
        with _naming("evaluate.inception"):
            resolve_file(inception)


def _models_of(recipe: Recipe) -> dict[str, tuple[str, str | None]]:
    """Setting -> folder, hub id or URL of a model, and its revision."""
    model, measured = recipe.model, recipe.evaluate
    judges = {f"evaluate.judges.{n}": path for n, path in measured.preference_models.items()}
    found = {
        "model.vae": model.vae,
        "evaluate.clip": measured.clip,
        "evaluate.image_encoder": measured.image_encoder,
        **judges,
    }
    others = {setting: (path, None) for setting, path in found.items() if path is not None}
    return {"model.path": (model.path, model.revision), **others}


def _is_here(setting: str, path: str, revision: str | None) -> bool:
    """Whether a model is a local folder. Raises ModelNotFound if neither it nor the hub has it."""
    with _naming(setting):
        if local_model(path) is not None:
            return True
        if "://" not in path:
            check_on_hub(path, revision=revision)
    return False


def _resolved(setting: str, path: str, revision: str | None = None) -> Path:
    """A model's local folder. Raises ModelNotFound, with the setting's name."""
    with _naming(setting):
        return resolve_model(path, revision=revision)


@contextmanager
def _naming(setting: str) -> Iterator[None]:
    """Put the setting's name before the message of a ModelNotFound, ModelAway or WrongInput."""
    try:
        yield
    except (ModelNotFound, ModelAway, WrongInput) as error:
        raise type(error)(f"{setting}: {error}") from None
