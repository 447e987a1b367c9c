"""The inputs of an evaluation, except the trained weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from artifacts.models import digest_model, digest_model_file
from artifacts.store import Artifact
from configs.settings.recipe import Recipe
from tasks.evaluate.draw_pictures import EvalModel, digest_eval_model, digest_pipeline
from tasks.evaluate.feature_encoders import digest_image_encoder
from tasks.trained_weights import BASE, TrainedWeights, weights_content


@dataclass(frozen=True)
class MeasuringModels:
    """Local copies of the models that measure pictures."""

    clip: Path  # CLIPModel folder
    image_encoder: Path | None = None  # vision model folder; None: clip
    preference_models: Mapping[str, Path] = field(default_factory=dict)  # judge -> CLIPModel folder
    inception: Path | None = None  # weights file; None: no metrics of Inception

    def digests(self) -> dict[str, str]:
        """Name -> sha256 of the models."""
        folders = {"clip": self.clip}
        folders |= {f"judge {name}": path for name, path in self.preference_models.items()}
        found = {name: digest_model(path) for name, path in folders.items()}
        if self.image_encoder is not None:
            found["image_encoder"] = digest_image_encoder(self.image_encoder)
        if self.inception is not None:
            found["inception"] = digest_model_file(self.inception)
        return found


@dataclass(frozen=True)
class EvalInputs:
    """A recipe, its data and its models."""

    recipe: Recipe
    images: Artifact  # with the held-out pictures
    latents: Artifact  # with the held-out latents
    base: Path  # pipeline folder
    vae: Path | None  # None: the VAE of the base
    measuring: MeasuringModels
    training_images: Artifact | None = None  # with the training pictures; None: images

    @property
    def training(self) -> Artifact:
        """The images among which copies of training pictures are searched."""
        return self.images if self.training_images is None else self.training_images

    def digests(self) -> dict[str, str]:
        """Input name -> sha256 of its content."""
        return {
            "images": self.images.digest,
            "training_images": self.training.digest,
            "latents": self.latents.digest,
            **model_digests(self.base, self.vae),
            **self.measuring.digests(),
        }

    def model(self, trained: Artifact | None = None, weights: TrainedWeights = BASE) -> EvalModel:
        """The base, or the model with the weights of a train artifact."""
        content = None if trained is None else weights_content(trained)
        digest = digest_eval_model(self.base, self.vae, content)
        return EvalModel(digest, self.base, weights, self.vae)


def model_digests(base: Path, vae: Path | None) -> dict[str, str]:
    """`base` and, if it is separate, `vae` -> sha256 of their content."""
    found = {"base": digest_pipeline(base)}
    return found | ({} if vae is None else {"vae": digest_model(vae)})
