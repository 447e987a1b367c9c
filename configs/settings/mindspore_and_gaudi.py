"""Settings of a training run for one runtime or device: MindSpore, Gaudi, float16."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from configs.settings.base_section import Section


class LossScale(Section):
    """Dynamic loss scaling for float16 (arXiv 1710.03740).

    An overflow skips the step and halves the scale; `growth_every` steps without one double it.
    """

    initial: float = Field(65536.0, ge=1, description="Initial loss scale.")
    growth_every: PositiveInt = Field(
        2000, description="Steps without an overflow before the scale doubles."
    )


class MindSpore(Section):
    """Settings of runtime mindspore."""

    mode: Literal["pynative", "graph"] = Field(
        "pynative", description="Execution: operator by operator (pynative) or as a compiled graph."
    )
    jit_level: Literal["O0", "O1", "O2"] = Field(
        "O0", description="Graph optimization: O0 none, O1 fusion, O2 CANN's engine (Ascend only)."
    )
    flash_attention: bool = Field(
        True, description="Use Ascend's fused attention with mixed_precision fp16 and bf16."
    )
    data_sink: bool = Field(
        True, description="Copy batches to the NPU while it computes the previous ones."
    )


class Hpu(Section):
    """Settings of device hpu (Intel Gaudi), for runtime torch."""

    mode: Literal["eager", "lazy"] | None = Field(
        None,
        description="Execution: eager runs operators one by one, or with torch.compile (see "
        "`compile`); lazy collects graphs up to each mark_step; null: PT_HPU_LAZY_MODE, or eager.",
    )
    graphs: bool = Field(
        False, description="Record and replay forward and backward as HPU graphs (mode lazy)."
    )
    max_graphs: PositiveInt = Field(
        10, description="Maximum number of cached HPU graphs, one per batch shape."
    )
    fused: bool = Field(
        True, description="Use Habana's FusedAdamW and FusedClipNorm if they are installed."
    )
    recipe_cache_megabytes: PositiveInt = Field(
        1024, description="Maximum size of the compiled graphs in the store, in MB."
    )
    gpu_migration: bool = Field(
        False, description="Load Habana's GPU migration toolkit, which maps cuda calls to hpu."
    )

    @model_validator(mode="after")
    def _check_mode(self) -> Hpu:
        if self.graphs and self.mode == "eager":
            raise ValueError("graphs requires mode: lazy")
        return self
