"""LoRA settings of a training run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

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
