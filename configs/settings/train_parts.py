"""Parts of the section `train`: adapters, timesteps, best checkpoint, monitoring, single runtimes.

The section `best_checkpoint` selects the weights to publish, and stops training early. Monitoring
is held-out loss, divergence, profiler and Weights & Biases. Settings for one runtime or device are
those of MindSpore, Gaudi and float16.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from configs.settings.base_section import Fraction, Section


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
