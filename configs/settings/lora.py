"""LoRA settings of a training run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from configs.settings.base_section import Section


class Lora(Section):
    """LoRA: low-rank adapters on frozen weights (arXiv 2106.09685)."""

    rank: PositiveInt = Field(16, description="Rank of the adapters.")
    alpha: float | None = Field(
        None, gt=0, description="Adapters are scaled by alpha / rank; null: alpha = rank."
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Dropout probability of an adapter's input."
    )
    target_modules: Literal["attention", "linear", "all"] | tuple[str, ...] = Field(
        "attention",
        description="Denoiser layers with an adapter: attention projections, all linear layers, "
        "all linear and convolution layers (LoCon), or a list of suffixes of layer names.",
    )
    dora: bool = Field(
        False, description="Train magnitude and direction separately (DoRA, arXiv 2402.09353)."
    )
    base_precision: Literal["int8"] | None = Field(
        None,
        description="`int8`: the linear layers of the frozen denoiser's blocks have 8-bit weights "
        "in training, half the memory; null: the compute dtype. Runtime `torch`.",
    )

    @model_validator(mode="after")
    def _check_base_precision(self) -> Lora:
        if self.base_precision is not None and self.dora:
            raise ValueError("base_precision: int8 requires dora: false")
        return self
