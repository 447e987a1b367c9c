"""Held-out loss, divergence, profiler and Weights & Biases of a training run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from configs.settings.base_section import Section


class HoldoutLoss(Section):
    """The loss on held-out samples with fixed noise, during training."""

    every_n_steps: int = Field(0, ge=0, description="Steps between evaluations; 0: none.")
    samples: PositiveInt = Field(64, description="Maximum number of held-out samples.")
    draws: PositiveInt = Field(1, description="Noise draws per sample.")


class OnDivergence(Section):
    """Reaction to a loss that is NaN or far above its recent mean."""

    action: Literal["stop", "skip"] = Field(
        "stop",
        description="stop ends the run with an error; skip restores the newest checkpoint and "
        "skips the batch.",
    )
    factor: float | None = Field(
        None,
        gt=1,
        description="Divergence threshold as a multiple of the recent mean loss; null: NaN only.",
    )
    patience: PositiveInt = Field(
        1, description="Consecutive steps above the threshold that count as divergence."
    )
    max_skips: PositiveInt = Field(
        5, description="Maximum number of skipped batches; one more stops the run."
    )


class Profile(Section):
    """A profiler trace for TensorBoard or chrome://tracing."""

    start: int = Field(10, ge=0, description="First traced step.")
    steps: int = Field(0, ge=0, description="Number of traced steps; 0: no trace.")


class Wandb(Section):
    """Weights & Biases; WANDB_API_KEY holds its API key."""

    project: str = Field(description="Project of the runs.")
    entity: str | None = Field(None, description="User or team; null: the account's default.")
    mode: Literal["online", "offline"] = Field(
        "online", description="Upload the run, or write local files only (offline)."
    )
