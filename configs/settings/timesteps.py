"""Timestep sampling of a training run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from configs.settings.base_section import Fraction, Section


class TimestepSampling(Section):
    """Distribution of the training timesteps."""

    distribution: Literal["uniform", "logit_normal"] = Field(
        "uniform", description="Distribution of u in (0, 1); SD3 uses logit_normal (2403.03206)."
    )
    logit_mean: float = Field(
        0.0,
        description="Mean of logit(u). The sign is diffusers': positive values select less noise "
        "(the paper's sign is opposite).",
    )
    logit_std: float = Field(1.0, gt=0, description="Standard deviation of logit(u).")
    bias_strategy: Literal["none", "earlier", "later", "range"] = Field(
        "none",
        description="Timesteps with another probability: the least noisy (earlier), the noisiest "
        "(later), or those from `bias_begin` to `bias_end` (range).",
    )
    bias_multiplier: float = Field(
        1.0, gt=0, description="Factor on the probability of the biased timesteps."
    )
    bias_portion: Fraction = Field(
        0.25, description="Fraction of the timesteps, 0 to 1, for earlier and later."
    )
    bias_begin: int = Field(0, ge=0, description="First timestep of the range.")
    bias_end: PositiveInt = Field(1000, description="End of the range, exclusive.")

    resolution_shift: bool = Field(
        False,
        description="Shift a flow's noise levels by the picture's size, as its pipeline does when "
        "it samples; the base's scheduler must have use_dynamic_shifting.",
    )

    @model_validator(mode="after")
    def _check(self) -> TimestepSampling:
        if self.bias_strategy != "none" and self.bias_multiplier == 1:
            raise ValueError(
                f"bias_strategy: {self.bias_strategy} has no effect with bias_multiplier: 1"
            )
        return self
