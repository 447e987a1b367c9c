"""Settings that `evaluate` and `generate` share: prompts and sampler."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from configs.settings.base_section import Dtype, ReadFile, Section

SchedulerName = Literal[
    "ddim",
    "ddim_parallel",
    "ddpm",
    "dpm++",
    "euler",
    "euler_ancestral",
    "flow_euler",
    "lms",
    "pndm",
]


class Prompts(Section):
    """Prompts, listed or from a text file."""

    prompts: tuple[str, ...] = Field((), description="Prompts, in order.")
    file: ReadFile | None = Field(
        None, description="Text file with one prompt per line, instead of `prompts`."
    )

    @model_validator(mode="after")
    def _check_prompts(self) -> Prompts:
        if not self.prompts and not self.file:
            raise ValueError("it has no prompts: set prompts, or file")
        if self.prompts and self.file:
            raise ValueError(
                "set either prompts or file, not both (`prompts: []` drops those of a recipe that "
                "is extended)"
            )
        for number, prompt in enumerate(self.prompts):
            try:
                prompt.encode()
            except UnicodeEncodeError:
                raise ValueError(f"prompts.{number} is not UTF-8: {prompt!a}") from None
        return self


class Sampling(Section):
    """Sampler and size of pictures."""

    scheduler: SchedulerName | None = Field(
        None, description="Sampling scheduler; null: the model's own."
    )
    true_cfg_scale: float = Field(
        1.0,
        ge=1,
        description="Classifier-free guidance scale of FLUX, whose guidance_scale is an input of "
        "the denoiser or without effect; 1 turns it off.",
    )
    height: PositiveInt | None = Field(
        None, description="Picture height in pixels; null: the model's default."
    )
    width: PositiveInt | None = Field(
        None, description="Picture width in pixels; null: the model's default."
    )
    aesthetic_score: float = Field(
        6.0, description="Aesthetic score, for a model trained with train.aesthetic_score."
    )
    negative_aesthetic_score: float = Field(
        2.5, description="Aesthetic score of the negative prompt, for the same models."
    )
    dtype: Dtype = Field("float32", description="Precision of the sampling pipeline.")
    offload: bool = Field(
        False,
        description="Keep the weights of denoiser and text encoders in the host's memory, and copy "
        "each layer to the device when it runs. The pictures are the same. Runtime `torch`.",
    )
