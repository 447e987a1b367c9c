"""Recipe section `place`: the work pool of each stage."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from configs.settings.base_section import Section

#: Stages that a work pool can run; publishing takes seconds, and stays with the flow.
PlacedStage = Literal["download", "encode", "train", "evaluate"]
PLACED_STAGES: tuple[PlacedStage, ...] = get_args(PlacedStage)
Pool = Annotated[str, Field(pattern=r"^[^/%&<>\s]+(/[^/%&<>\s]+)?$")]


class Place(Section):
    """Prefect work pools, as POOL or POOL/QUEUE, that run stages; null: where the flow runs."""

    download: Pool | None = Field(None, description="Work pool that downloads; null: here.")
    encode: Pool | None = Field(None, description="Work pool that encodes; null: here.")
    train: Pool | None = Field(None, description="Work pool that trains; null: here.")
    evaluate: Pool | None = Field(None, description="Work pool that evaluates; null: here.")

    def pools(self) -> dict[PlacedStage, str]:
        """Stage -> POOL or POOL/QUEUE, of the stages that have one."""
        found = {stage: getattr(self, stage) for stage in PLACED_STAGES}
        return {stage: pool for stage, pool in found.items() if pool is not None}
