"""The inputs of an evaluation, except the trained weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from artifacts.resolve_model import digest_model
from artifacts.store import Artifact
from configs.recipe import Recipe
from tasks.evaluate.draw_pictures import EvalModel, digest_eval_model, digest_pipeline
from tasks.trained_weights import BASE, TrainedWeights, weights_content


@dataclass(frozen=True)
class EvalInputs:
    """A recipe, its data and its models."""

    recipe: Recipe
    images: Artifact  # with the held-out pictures
    latents: Artifact  # with the held-out latents
    base: Path  # pipeline folder
    vae: Path | None  # None: the VAE of the base
    clip: Path  # CLIPModel folder
    image_encoder: Path | None = None  # vision model folder; None: clip
    preference_models: Mapping[str, Path] = field(default_factory=dict)  # judge -> CLIPModel folder

    def digests(self) -> dict[str, str]:
        """Input name -> sha256 of its content."""
        found = {
            "images": self.images.digest,
            "latents": self.latents.digest,
            "base": digest_pipeline(self.base),
            **self.measuring_models(),
        }
        return found | ({} if self.vae is None else {"vae": digest_model(self.vae)})

    def measuring_models(self) -> dict[str, str]:
        """Name -> sha256 of the models that measure pictures."""
        folders = {"clip": self.clip}
        if self.image_encoder is not None:
            folders["image_encoder"] = self.image_encoder
        folders |= {f"judge {name}": path for name, path in self.preference_models.items()}
        return {name: digest_model(path) for name, path in folders.items()}

    def model(self, trained: Artifact | None = None, weights: TrainedWeights = BASE) -> EvalModel:
        """The base, or the model with the weights of a train artifact."""
        content = None if trained is None else weights_content(trained)
        digest = digest_eval_model(self.base, self.vae, content)
        return EvalModel(digest, self.base, weights, self.vae)
