"""Settings of the section `evaluate`: prompt sets, metrics and the sampler."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from configs.sampling import Prompts, Sampling
from configs.section import StoredUrl


class PromptSet(Prompts):
    """A named set of prompts, with metrics of its own."""

    images_per_prompt: PositiveInt = Field(
        1, description="Pictures per prompt, each with its own noise."
    )
    compare: bool = Field(
        True,
        description="Include these pictures in cmmd and fd, the comparison with held-out pictures. "
        "Use false for subjects absent from the held-out pictures.",
    )


class Evaluate(Sampling):
    """Compare the tuned model with its base on equal prompts and noise."""

    prompts: dict[str, PromptSet] = Field(description="Named prompt sets.", min_length=1)
    clip: StoredUrl = Field(
        description="CLIPModel folder for the CLIP metrics: hub id, local path or fsspec URL."
    )
    judges: tuple[Literal["digits"], ...] = Field(
        (), description="Additional judges of the pictures."
    )
    num_inference_steps: PositiveInt = Field(30, description="Denoising steps.")
    guidance_scale: float = Field(
        5.0, ge=0, description="Classifier-free guidance scale; 1 or less turns guidance off."
    )
    batch_size: PositiveInt = Field(4, description="Pictures per sampling batch.")
    seed: int = Field(
        0, ge=0, description="Seed of the initial noise, the loss noise and the bootstrap."
    )
    bootstrap: PositiveInt = Field(200, description="Resamples per confidence interval.")
    holdout_samples: PositiveInt = Field(
        256, description="Maximum number of held-out samples for the loss."
    )
    holdout_draws: PositiveInt = Field(4, description="Noise draws per held-out sample.")
    device: str = Field("auto", description="Device: see train.device.")
