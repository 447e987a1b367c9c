"""Settings of the section `sweep`: the values to try, and the metric of the best trial."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from configs.settings.base_section import NullDrops, Section
from configs.settings.best_checkpoint import HOLDOUT_LOSS


class Sweep(Section):
    """Train once per combination of values; used by `kiln sweep` alone."""

    values: Annotated[dict[str, tuple[Any, ...]], NullDrops] = Field(
        default_factory=dict,
        description="Dotted setting of section `train` -> the values to try. Several settings form "
        "a grid; null instead of values drops those of the extended recipe.",
    )
    metric: str = Field(
        HOLDOUT_LOSS, description="Metric of the evaluation that selects the best trial."
    )
    mode: Literal["min", "max"] | None = Field(
        None,
        description="Best value of the metric: min or max; null: min for losses, distances and "
        "memorisation, else max.",
    )

    @field_validator("values")
    @classmethod
    def _check_values(cls, values: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        for name, tried in values.items():
            if not name.startswith("train."):
                raise ValueError(
                    f"{name} cannot be swept: trials share download, encode and evaluation, so "
                    "only settings of `train` can"
                )
            if not tried:
                raise ValueError(f"{name} has no values")
        return values
