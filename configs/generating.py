"""Settings of the flow `generate`: the model, the prompts and the sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, PositiveInt, ValidationError, model_validator

from configs.load import RecipeError, explain
from configs.schema import RuntimeName, SchedulerName
from configs.section import Section


class Generate(Section):
    """Pictures of prompts, sampled from a published model or any other."""

    model: str = Field(
        description="Model: registry name (`digits` for its champion, `digits@v2` for a version), "
        "folder, hub id, or fsspec URL."
    )
    prompts: tuple[str, ...] = Field((), description="Prompts; every round samples each of them.")
    file: str | None = Field(
        None, description="Text file with one prompt per line, instead of `prompts`."
    )
    negative_prompt: str | None = Field(
        None, description="Negative prompt of classifier-free guidance; null: the empty prompt."
    )
    num_images_per_prompt: PositiveInt = Field(
        4, description="Pictures per prompt and round; also the batch size."
    )
    num_rounds: PositiveInt = Field(1, description="Rounds, each with new noise.")
    grid_columns: PositiveInt | None = Field(
        None, description="Pictures per row of the grid; null: num_images_per_prompt."
    )
    height: PositiveInt | None = Field(
        None, description="Picture height in pixels; null: the model's default."
    )
    width: PositiveInt | None = Field(
        None, description="Picture width in pixels; null: the model's default."
    )
    num_inference_steps: PositiveInt = Field(50, description="Denoising steps.")
    scheduler: SchedulerName | None = Field(
        None, description="Sampling scheduler; null: the model's own."
    )
    ddim_eta: float = Field(
        0.0, ge=0, le=1, description="DDIM's eta (arXiv 2010.02502); 0 is deterministic."
    )
    guidance_scale: float = Field(
        7.5, ge=0, description="Classifier-free guidance scale; 1 or less turns guidance off."
    )
    aesthetic_score: float = Field(
        6.0, description="Aesthetic score to condition on, for models trained with scores."
    )
    negative_aesthetic_score: float = Field(
        2.5, description="Aesthetic score of the negative prompt, for models trained with scores."
    )
    seed: int = Field(42, ge=0, lt=2**63, description="Noise seed; the host draws the noise.")
    fixed_noise: bool = Field(
        False, description="Start every prompt and round from equal noise (fixed_code)."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Precision of the whole pipeline."
    )
    runtime: RuntimeName = Field("torch", description="Runtime that samples.")
    device: str = Field("auto", description="Device, as a recipe's train.device.")
    store: str = Field("store", description="Artifact store: folder or fsspec URL.")
    registry: str | None = Field(
        None, description="Registry folder or fsspec URL; null: `registry` in the store."
    )

    @model_validator(mode="after")
    def _some_prompts(self) -> Generate:
        if bool(self.prompts) == bool(self.file):
            raise ValueError("set either prompts or file, not both")
        return self


def read_settings(
    model: str, prompts: Sequence[str] | None, settings: Mapping[str, Any] | None
) -> Generate:
    """The settings of a `generate` run. Raises RecipeError, with one line per invalid setting."""
    own = {"model": model, "prompts": tuple(prompts or ())}
    if twice := sorted(own.keys() & (settings or {}).keys()):
        raise RecipeError(f"generate: {twice[0]} is an argument of its own, not a setting")
    given = {**own, **(settings or {})}
    try:
        return Generate.model_validate(given)
    except ValidationError as error:
        raise RecipeError(explain("generate", error, given, Generate)) from None
