"""Settings of the section `train.best_checkpoint`: the weights to publish, and early stop."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from configs.settings.base_section import Section

HOLDOUT_LOSS = "holdout_loss"


class BestCheckpoint(Section):
    """The rule that chooses the checkpoint to evaluate and publish, and that stops early."""

    metric: str = Field(
        HOLDOUT_LOSS,
        description="Score of a checkpoint: holdout_loss, or clip_score or a judge's metric of its "
        "sample pictures.",
    )
    mode: Literal["min", "max"] | None = Field(
        None, description="Best score: min or max; null: min for holdout_loss, else max."
    )
    patience: PositiveInt | None = Field(
        None,
        description="Consecutive checkpoints without an improvement that end the run; null: no "
        "early stop.",
    )
    min_delta: float = Field(
        0.0, ge=0, description="An improvement counts for `patience` if it is larger than this."
    )

    @model_validator(mode="after")
    def _check(self) -> BestCheckpoint:
        if self.patience is None and self.min_delta:
            raise ValueError("best_checkpoint.min_delta requires best_checkpoint.patience")
        return self

    @property
    def by_samples(self) -> bool:
        """Whether the sample pictures are scored, rather than held-out samples."""
        return self.metric != HOLDOUT_LOSS

    @property
    def lower_is_better(self) -> bool:
        return not self.by_samples if self.mode is None else self.mode == "min"
