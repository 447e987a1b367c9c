"""Everything that can be found wrong with a recipe before any work starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runtimes.registry import probe

from artifacts.models import digest_model, resolve_model
from artifacts.store import Store
from configs.load import RecipeError
from configs.schema import Recipe
from tasks import evaluate
from tasks.download import sources
from tasks.publish.gate import check_rules
from tasks.stage import storage_error

ENCODERS = ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
TRAINED = ("unet", "scheduler")


@dataclass(frozen=True)
class Prepared:
    """A recipe that can run: its store is writable, and its models are on this machine."""

    recipe: Recipe
    store: Store
    model: Path
    vae: Path | None
    clip: Path

    def encoders_digest(self) -> str:
        """Fingerprint of the weights that images and captions are encoded with."""
        vae = digest_model(self.vae) if self.vae else ""
        return digest_model(self.model, ENCODERS) + vae

    def base_digest(self) -> str:
        """Fingerprint of the weights that training starts from."""
        return digest_model(self.model, TRAINED)


def prepare(recipe: Recipe) -> Prepared:
    """Check a recipe against the world.

    Raises ValueError (RecipeError, GateError, ModelNotFound, SourceError, WrongInput) or
    StorageError with one clear line.
    """
    check_rules(recipe.publish.gate, evaluate.metric_names(recipe))
    found = probe(recipe.runtime)
    if not found.available:
        raise RecipeError(f"runtime {recipe.runtime}: {found.reason}")
    store = Store(recipe.store)
    try:
        store.check_writable()
    except OSError as error:
        raise storage_error(store, error) from error
    sources.check(recipe)
    evaluate.check(recipe)
    model = recipe.model
    return Prepared(
        recipe,
        store,
        resolve_model(model.path, revision=model.revision, variant=model.variant),
        resolve_model(model.vae) if model.vae else None,
        resolve_model(recipe.evaluate.clip),
    )
