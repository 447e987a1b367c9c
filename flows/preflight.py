"""Everything that can be found wrong with a recipe before any work starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from artifacts.models import digest_model, resolve_model
from artifacts.store import Store
from configs.load import RecipeError
from configs.schema import Recipe
from runtimes.encoders import describe_encoders
from runtimes.loop import read_schedule
from runtimes.registry import probe_runtime
from tasks import download, evaluate
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
    found = probe_runtime(recipe.runtime)
    if not found.available:
        raise RecipeError(f"runtime {recipe.runtime}: {found.reason}")
    _check_devices(recipe, found.devices)
    store = Store(recipe.store)
    try:
        store.check_writable()
    except OSError as error:
        raise RecipeError(f"store: {storage_error(store, error)}") from error
    download.check(recipe)
    evaluate.check(recipe)
    model = recipe.model
    folder = resolve_model(model.path, revision=model.revision, variant=model.variant)
    vae = resolve_model(model.vae) if model.vae else None
    describe_encoders(folder, vae)  # raises for a folder of another family, or without its configs
    _check_prediction_type(recipe, folder)
    return Prepared(recipe, store, folder, vae, resolve_model(recipe.evaluate.clip))


def _check_devices(recipe: Recipe, there: list[str]) -> None:
    sections = {"encode": recipe.encode, "train": recipe.train, "evaluate": recipe.evaluate}
    for name, section in sections.items():
        if section.device != "auto" and not any(d.startswith(section.device) for d in there):
            known = ", ".join(there)
            raise RecipeError(f"{name}.device: {section.device} is not on this machine ({known})")


def _check_prediction_type(recipe: Recipe, model: Path) -> None:
    wanted = recipe.train.prediction_type
    found = read_schedule(model).prediction_type
    if wanted not in (None, found):
        raise RecipeError(
            f"train.prediction_type: {wanted}, but the base's scheduler says {found}; training a "
            "model over to another prediction type is not built yet: leave it null"
        )
