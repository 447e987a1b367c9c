"""Settings of the section `retrain`: what `kiln retrain` does with new rows of the source."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from configs.settings.base_section import Section


class Retrain(Section):
    """Train again when the source has new rows; used by `kiln retrain` alone."""

    start: Literal["champion", "base"] = Field(
        "champion",
        description="Weights at step 0. champion: its weights, trained on the new samples and a "
        "replay; base: the base's, trained by section `train` on all samples.",
    )
    epochs: float = Field(
        10.0,
        gt=0,
        description="Passes over the new samples and the replay; the number of steps is therefore "
        "proportional to the new samples.",
    )
    max_steps: PositiveInt = Field(10_000, description="Maximum number of steps.")
    replay: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.5,
        description="Share of the champion's samples among the training samples, 0 to below 1, "
        "against forgetting. It is lower if the champion's unchanged shards have fewer samples.",
    )
    learning_rate: float | None = Field(
        None, gt=0, description="Peak learning rate; null: train.learning_rate."
    )
    min_new_rows: PositiveInt = Field(
        1, description="New rows of the source below which nothing is trained."
    )
