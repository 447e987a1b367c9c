"""Settings of the section `evaluate`: prompt sets, metrics and the sampler."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from configs.settings.base_section import Fraction, ModelPlace, NullDrops, Section
from configs.settings.sampling import Prompts, Sampling

JudgeName = Literal["digits"]


class PromptSet(Prompts):
    """A named set of prompts, with metrics of its own."""

    images_per_prompt: PositiveInt = Field(
        1, description="Pictures per prompt, each with its own noise."
    )
    compare: bool = Field(
        True,
        description="Include these pictures in cmmd, fd, kid, precision and recall, the comparison "
        "with held-out pictures. Use false for subjects absent from the held-out pictures.",
    )


class PreferenceModel(Section):
    """A judge: a CLIPModel tuned on people's choices, such as PickScore or HPSv2."""

    name: str = Field(description="Name of the metric.", pattern=r"^[a-z][a-z0-9_]*$")
    path: ModelPlace = Field(description="CLIPModel folder: hub id, local path or fsspec URL.")


class Memorization(Section):
    """The search for training pictures among the samples."""

    pictures: PositiveInt = Field(
        5000, description="Maximum number of training pictures to search."
    )
    similarity: Fraction = Field(
        0.95,
        description="A sample counts in `memorized` from this cosine of features on, to its "
        "nearest training picture.",
    )
    pixel_similarity: Fraction = Field(
        0.95,
        description="A sample counts in `memorized_pixels` from this correlation of pixels on.",
    )


class Evaluate(Sampling):
    """Compare the tuned model with its base on equal prompts and noise."""

    prompts: Annotated[dict[str, PromptSet], NullDrops] = Field(
        description="Named prompt sets; null instead of one drops that of the extended recipe.",
        min_length=1,
    )
    clip: ModelPlace = Field(
        description="CLIPModel folder for clip_score and cmmd: hub id, local path or fsspec URL."
    )
    image_encoder: ModelPlace | None = Field(
        None,
        description="Vision model of transformers (such as DINOv2) for fd, kid, precision, recall "
        "and memorized: hub id, local path or fsspec URL; null: `clip`.",
    )
    inception: ModelPlace | None = Field(
        None,
        description="Weights file of torch-fidelity's InceptionV3 for fd_inception and "
        "kid_inception: local path or fsspec URL; null: without these metrics.",
    )
    judges: tuple[JudgeName | PreferenceModel, ...] = Field(
        (), description="Additional judges of the pictures: names, or preference models."
    )
    memorization: Memorization = Memorization()
    num_inference_steps: PositiveInt = Field(30, description="Denoising steps.")
    guidance_scale: float = Field(
        5.0,
        ge=0,
        description="Classifier-free guidance scale; 1 or less turns guidance off (for Z-Image 0). "
        "For FLUX.1 dev it is an input of the denoiser.",
    )
    batch_size: PositiveInt = Field(4, description="Pictures per sampling batch.")
    seed: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="Seed of the initial noise, the loss noise and the bootstrap.",
    )
    bootstrap: PositiveInt = Field(1000, description="Resamples per confidence interval.")
    holdout_samples: PositiveInt = Field(
        256, description="Maximum number of held-out samples for the loss, at 8 noise levels each."
    )
    device: str = Field("auto", description="Device: see train.device.")

    @model_validator(mode="after")
    def _check_judges(self) -> Evaluate:
        names = [one if isinstance(one, str) else one.name for one in self.judges]
        if len(set(names)) < len(names):
            raise ValueError("judges: two judges have the same name")
        return self

    @property
    def preference_models(self) -> dict[str, str]:
        """Name -> folder of each judge that is a preference model."""
        return {one.name: one.path for one in self.judges if isinstance(one, PreferenceModel)}
