"""Everything that can be found wrong with a recipe before any work starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from artifacts.models import ModelNotFound, digest_model, resolve_model
from artifacts.store import Store
from configs.load import RecipeError
from configs.schema import Recipe
from runtimes.encoders import describe_encoders, vae_path
from runtimes.loop import read_schedule
from runtimes.registry import probe_runtime
from tasks import download, evaluate
from tasks.encode.transform import TransformSettings, bucket_sizes
from tasks.publish.assemble import missing_weights
from tasks.publish.gate import check_rules
from tasks.stage import storage_error

TRAINED = ("unet", "scheduler")


@dataclass(frozen=True)
class Prepared:
    """A recipe that can run: its store is writable, and its models are on this machine."""

    recipe: Recipe
    store: Store
    model: Path
    vae: Path | None
    clip: Path

    def base_digest(self) -> str:
        """Fingerprint of the weights that training starts from."""
        return digest_model(self.model, TRAINED)


def prepare(recipe: Recipe) -> Prepared:
    """Check a recipe against the world.

    Raises a ValueError of ours (RecipeError, GateError, ModelNotFound, SourceError, WrongInput)
    with one clear line.
    """
    check_rules(recipe.publish.gate, evaluate.metric_names(recipe))
    store = _check_places(recipe)
    _check_runtime(recipe)
    download.check(recipe)
    evaluate.check(recipe)
    if recipe.beam:
        from tasks.beam import check_options  # seconds to import

        check_options(recipe.beam)
    model, vae = _check_models(recipe)
    clip = resolve_model(recipe.evaluate.clip)
    evaluate.check_clip(clip)
    return Prepared(recipe, store, model, vae, clip)


def _check_places(recipe: Recipe) -> Store:
    store = Store(recipe.store)
    registry = recipe.publish.registry
    for place in [store] if registry is None else [store, Store(registry)]:
        try:
            place.check_writable()
        except OSError as error:
            raise RecipeError(f"store: {storage_error(place, error)}") from error
    return store


def _check_runtime(recipe: Recipe) -> None:
    found = probe_runtime(recipe.runtime)
    if not found.available:
        raise RecipeError(f"runtime {recipe.runtime}: {found.reason}")
    names = {words.split()[0] for words in found.devices}  # cpu, cuda:0, ...
    names |= {name.partition(":")[0] for name in names}
    for section in ("encode", "train", "evaluate"):
        device = getattr(recipe, section).device
        if device not in {"auto", *names}:
            known = ", ".join(found.devices)
            raise RecipeError(f"{section}.device: {device} is not on this machine ({known})")


def _check_models(recipe: Recipe) -> tuple[Path, Path | None]:
    """The base's folder and, if the recipe names one, another VAE's."""
    model = resolve_model(recipe.model.path, revision=recipe.model.revision)
    vae = resolve_model(recipe.model.vae) if recipe.model.vae else None
    # Raises for a folder of another family, or without its configs.
    factor = describe_encoders(model, vae)["vae_scale_factor"]
    bucket_sizes(TransformSettings.of(recipe), factor)
    evaluate.check_size(recipe, model, vae)
    _check_weights(model, vae)
    _check_prediction_type(recipe, model)
    return model, None if vae is None else vae_path(model, vae)


def _check_weights(model: Path, vae: Path | None) -> None:
    missing = [part for part in missing_weights(model) if part != "vae" or vae is None]
    if missing:
        raise ModelNotFound(f"model {model}: no .safetensors weights in {', '.join(missing)}")


def _check_prediction_type(recipe: Recipe, model: Path) -> None:
    wanted = recipe.train.prediction_type
    found = read_schedule(model).prediction_type
    if wanted not in (None, found):
        raise RecipeError(
            f"train.prediction_type: {wanted}, but the base's scheduler says {found}; training a "
            "model over to another prediction type is not built yet: leave it null"
        )
