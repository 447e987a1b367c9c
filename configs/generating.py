"""Every setting of the flow `generate`: which model draws which prompts, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, PositiveInt, ValidationError, model_validator

from configs.load import RecipeError, explain
from configs.schema import RuntimeName, SchedulerName
from configs.section import Section


class Generate(Section):
    """Pictures of prompts, by a published model or any other."""

    model: str = Field(
        description="A model of the registry (`digits` is its champion, `digits@v2` that version), "
        "a folder, a hub id, or an fsspec URL."
    )
    prompts: tuple[str, ...] = Field((), description="Prompts, each drawn in every round.")
    file: str | None = Field(None, description="Or a text file with one prompt a line.")
    negative_prompt: str | None = Field(None, description="What guidance leads away from.")
    num_images_per_prompt: PositiveInt = Field(
        4, description="Pictures of a prompt, drawn at once."
    )
    num_rounds: PositiveInt = Field(1, description="Rounds, each with noise of its own.")
    grid_columns: PositiveInt | None = Field(
        None, description="Pictures in a row of the grid; null is num_images_per_prompt."
    )
    height: PositiveInt | None = Field(None, description="Pixels; null is the model's own size.")
    width: PositiveInt | None = Field(None, description="Pixels; null is the model's own size.")
    num_inference_steps: PositiveInt = Field(50, description="Denoising steps.")
    scheduler: SchedulerName | None = Field(
        None, description="What steps are taken by; null is the model's own scheduler."
    )
    ddim_eta: float = Field(
        0.0, ge=0, le=1, description="Noise of DDIM's steps (arXiv 2010.02502); 0 draws none."
    )
    guidance_scale: float = Field(7.5, ge=0, description="Classifier-free guidance.")
    aesthetic_score: float = Field(6.0, description="Of models trained with scores.")
    negative_aesthetic_score: float = Field(2.5, description="What guidance leads away from.")
    seed: int = Field(42, ge=0, lt=2**63, description="Seed of the noise, drawn on the host.")
    fixed_noise: bool = Field(
        False, description="Every prompt and round starts from the same noise (fixed_code)."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Of the whole pipeline."
    )
    runtime: RuntimeName = Field("torch", description="What draws.")
    device: str = Field("auto", description="As train.device of a recipe.")
    store: str = Field("store", description="Where pictures are kept: a folder or fsspec URL.")
    registry: str | None = Field(None, description="Null is `registry` in the store.")

    @model_validator(mode="after")
    def _some_prompts(self) -> Generate:
        if bool(self.prompts) == bool(self.file):
            raise ValueError("give either prompts or a file of them")
        return self


def read_settings(
    model: str, prompts: Sequence[str] | None, settings: Mapping[str, Any] | None
) -> Generate:
    """Raises RecipeError, saying what is wrong with which setting."""
    own = {"model": model, "prompts": tuple(prompts or ())}
    if twice := sorted(own.keys() & (settings or {}).keys()):
        raise RecipeError(f"generate: {twice[0]} is an argument of its own, no setting")
    given = {**own, **(settings or {})}
    try:
        return Generate.model_validate(given)
    except ValidationError as error:
        raise RecipeError(explain("generate", error, given, Generate)) from None
