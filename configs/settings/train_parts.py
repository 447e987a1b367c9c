"""Parts of the section `train`: adapters, timesteps, best checkpoint, monitoring, single runtimes.

The section `best_checkpoint` selects the weights to publish, and stops training early. Monitoring
is held-out loss, divergence, profiler and Weights & Biases. Settings for one runtime or device are
those of MindSpore, Gaudi and float16.
"""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from configs.settings.base_section import Fraction, ModelPlace, ReadFile, Section, setting


class Lora(Section):
    """LoRA: low-rank adapters on frozen weights (arXiv 2106.09685)."""

    rank: PositiveInt = setting(16, aka="rank network_dim lora_rank (DKS)")
    """Rank of the adapters."""
    alpha: PositiveFloat | None = setting(
        None, aka="network_alpha lora_alpha (DKS): null here is the rank; kohya's default is 1"
    )
    """Adapters are scaled by alpha / rank; null: alpha = rank."""
    dropout: float = setting(0.0, ge=0, lt=1, aka="network_dropout lora_dropout (DKS)")
    """Dropout probability of an adapter's input."""
    target_modules: Literal["attention", "linear", "all"] | tuple[str, ...] = setting(
        "attention", aka="target_modules lora_layers flux_lora_target (DS)"
    )
    """Denoiser layers with an adapter: attention projections, all linear layers, all linear and
    convolution layers (LoCon), or a list of suffixes of layer names."""
    dora: bool = False
    """Train magnitude and direction separately (DoRA, arXiv 2402.09353)."""
    base_precision: Literal["int8", "nf4"] | None = setting(
        None,
        aka="fp8_base fp8_scaled base_model_precision (KS): `int8`, such as for `fp8_base` or "
        "`int8-quanto`; `nf4` for `nf4-bnb`",
    )
    """`int8`, `nf4`: the linear layers of the frozen denoiser's blocks have weights of 8 or 4 bits
    (arXiv 2305.14314) in training, a half or 28% of the memory; null: the compute dtype. Runtime
    `torch`."""

    start: ReadFile | None = setting(
        None, not_in_key="content", aka="network_weights init_lora (KS)"
    )
    """File of adapters with which training starts, instead of new ones: local path or URL, in the
    layout of diffusers, PEFT or kohya; of equal rank and layers."""
    assistant: ReadFile | None = setting(None, not_in_key="content")
    """File of adapters that are merged into the frozen denoiser for training, and are in no
    published file, such as one that undoes a distillation: local path or URL, as `start`."""

    def faults(self) -> Iterator[str]:
        if self.base_precision is not None and self.dora:
            yield f"base_precision: {self.base_precision} requires dora: false"


class ControlNet(Section):
    """ControlNet: a network beside the frozen denoiser, with a control picture (2302.05543)."""

    start: ModelPlace | None = setting(
        None, not_in_key="content", aka="controlnet_model_name_or_path (D)"
    )
    """ControlNet folder of diffusers with which training starts: hub id, local path or fsspec URL;
    null: a copy of the base's first blocks, which has no effect at first."""
    num_layers: int | None = setting(
        None, ge=0, aka="num_double_layers (D): of train_controlnet_flux.py"
    )
    """Blocks of two streams of a new ControlNet; null: 4, or all that the base has. Family flux."""
    num_single_layers: int | None = setting(None, ge=0, aka="num_single_layers (D)")
    """Blocks of one stream of a new ControlNet; null: 10, or all that the base has. Family flux."""

    @property
    def layers(self) -> dict[str, int]:
        """`num_layers` and `num_single_layers`, those that are set."""
        chosen = {"num_layers": self.num_layers, "num_single_layers": self.num_single_layers}
        return {name: number for name, number in chosen.items() if number is not None}

    def faults(self) -> Iterator[str]:
        if self.start is not None and self.layers:
            yield "start has layers of its own: set num_layers and num_single_layers to null"
        if self.num_layers == self.num_single_layers == 0:
            yield "num_layers and num_single_layers are 0: a ControlNet needs a block"


class TimestepSampling(Section):
    """Distribution of the training timesteps."""

    distribution: Literal["uniform", "logit_normal"] = "uniform"
    """Distribution of u in (0, 1); SD3 uses logit_normal (2403.03206)."""
    logit_mean: float = setting(
        0.0, needs="distribution == logit_normal", aka="logit_mean (DK): with the same sign"
    )
    """Mean of logit(u). The sign is diffusers': positive values select less noise (the paper's sign
    is opposite)."""
    logit_std: PositiveFloat = setting(
        1.0, needs="distribution == logit_normal", aka="logit_std (DK)"
    )
    """Standard deviation of logit(u)."""
    bias_strategy: Literal["none", "earlier", "later", "range"] = setting(
        "none", aka="timestep_bias_strategy (DS)"
    )
    """Timesteps with another probability: the least noisy (earlier), the noisiest (later), or those
    from `bias_begin` to `bias_end` (range)."""
    bias_multiplier: PositiveFloat = setting(
        1.0, needs="bias_strategy != none", aka="timestep_bias_multiplier (DS)"
    )
    """Factor on the probability of the biased timesteps."""
    bias_portion: Fraction = setting(
        0.25,
        needs="bias_strategy == earlier or bias_strategy == later",
        aka="timestep_bias_portion (DS)",
    )
    """Fraction of the timesteps, 0 to 1, for earlier and later."""
    bias_begin: int = setting(
        0,
        ge=0,
        needs="bias_strategy == range",
        aka="timestep_bias_begin min_timestep (DKS): a weight by `bias_multiplier`; kohya "
        "excludes the others",
    )
    """First timestep of the range."""
    bias_end: PositiveInt = setting(
        1000,
        needs="bias_strategy == range",
        aka="timestep_bias_end max_timestep (DKS): a weight by `bias_multiplier`; kohya excludes "
        "the others",
    )
    """End of the range, exclusive."""

    resolution_shift: bool = setting(
        False,
        aka="timestep_sampling flow_schedule_auto_shift (KS): true for `flux_shift` or auto, "
        "which also need `distribution: logit_normal`",
    )
    """Shift a flow's noise levels by the picture's size, as its pipeline does when it samples; the
    base's scheduler must have use_dynamic_shifting."""

    def faults(self) -> Iterator[str]:
        if self.bias_strategy != "none" and self.bias_multiplier == 1:
            yield f"bias_strategy: {self.bias_strategy} has no effect with bias_multiplier: 1"


class MaskedLoss(Section):
    """The loss of each latent position is multiplied by the picture's mask there, 0 to 1."""

    unmasked_weight: Fraction = setting(0.0, aka="unmasked_weight (O)")
    """Least factor, 0 to 1: that of positions which the mask hides."""
    area_normalised: bool = setting(False, aka="normalize_masked_area_loss (O)")
    """Divide the mask by its mean, so that a picture has the same weight whatever area its mask
    shows."""


class Huber(Section):
    """The transition from squared to absolute errors of `loss: huber` and `smooth_l1`, by the
    formulas of kohya's sd-scripts."""

    schedule: Literal["constant", "exponential", "snr"] = setting("snr", aka="huber_schedule (DKS)")
    """By timestep t of T: delta x scale (constant); delta^(t / T) x scale (exponential); or
    (1 - delta) / (1 + SNR^-1/2)^2 + delta, for diffusion alone (snr)."""
    delta: PositiveFloat = setting(0.1, aka="huber_c (DKS)")
    """Error, in units of the latents, from which on the loss is linear."""
    scale: PositiveFloat = setting(1.0, needs="schedule != snr", aka="huber_scale (K)")
    """Factor of delta."""


HOLDOUT_LOSS = "holdout_loss"


class BestCheckpoint(Section):
    """The rule that chooses the checkpoint to evaluate and publish, and that stops early."""

    metric: str = HOLDOUT_LOSS
    """Score of a checkpoint: holdout_loss, or clip_score or a judge's metric of its sample
    pictures."""
    mode: Literal["min", "max"] | None = setting(None, aka="greater_is_better (T): `min` or `max`")
    """Best score: min or max; null: min for holdout_loss, else max."""
    patience: PositiveInt | None = setting(None, aka="early_stopping_patience (T)")
    """Consecutive checkpoints without an improvement that end the run; null: no early stop."""
    min_delta: float = setting(0.0, ge=0, aka="early_stopping_threshold (T)")
    """An improvement counts for `patience` if it is larger than this."""

    def faults(self) -> Iterator[str]:
        if self.patience is None and self.min_delta:
            yield "best_checkpoint.min_delta requires best_checkpoint.patience"

    def key_settings(self) -> dict[str, Any]:
        """As those of a section; `mode: null` is the mode that it stands for."""
        return super().key_settings() | {"mode": "min" if self.lower_is_better else "max"}

    @property
    def by_samples(self) -> bool:
        """Whether the sample pictures are scored, rather than held-out samples."""
        return self.metric != HOLDOUT_LOSS

    @property
    def lower_is_better(self) -> bool:
        return not self.by_samples if self.mode is None else self.mode == "min"


class HoldoutLoss(Section):
    """The loss on held-out samples with fixed noise, during training."""

    every_n_steps: int = setting(0, ge=0, not_in_key="execution", aka="eval_steps_interval (S)")
    """Steps between evaluations; 0: none."""
    samples: PositiveInt = setting(64, needs="every_n_steps")
    """Maximum number of held-out samples of each source."""
    draws: PositiveInt = setting(1, needs="every_n_steps")
    """Noise draws per sample."""


class OnDivergence(Section):
    """Reaction to a loss that is NaN or far above its recent mean."""

    action: Literal["stop", "skip"] = setting("stop", not_in_key="execution")
    """stop ends the run with an error; skip restores the newest checkpoint and skips the batch."""
    factor: float | None = setting(None, gt=1)
    """Divergence threshold as a multiple of the recent mean loss; null: NaN only."""
    patience: PositiveInt = setting(1, needs="factor")
    """Consecutive steps above the threshold that count as divergence."""
    max_skips: PositiveInt = setting(5, not_in_key="execution", needs="action == skip")
    """Maximum number of skipped batches; one more stops the run."""


class Profile(Section):
    """A profiler trace for TensorBoard or chrome://tracing."""

    start: int = setting(10, ge=0, needs="steps")
    """First traced step."""
    steps: int = setting(0, ge=0)
    """Number of traced steps; 0: no trace."""


class Wandb(Section):
    """Weights & Biases; WANDB_API_KEY holds its API key."""

    project: str
    """Project of the runs."""
    entity: str | None = None
    """User or team; null: the account's default."""
    mode: Literal["online", "offline"] = "online"
    """Upload the run, or write local files only (offline)."""


class LossScale(Section):
    """Dynamic loss scaling for float16 (arXiv 1710.03740).

    An overflow skips the step and halves the scale; `growth_every` steps without one double it.
    """

    initial: float = setting(65536.0, ge=1)
    """Initial loss scale."""
    growth_every: PositiveInt = 2000
    """Steps without an overflow before the scale doubles."""


class MindSpore(Section):
    """Settings of runtime mindspore."""

    mode: Literal["pynative", "graph"] = "pynative"
    """Execution: operator by operator (pynative) or as a compiled graph."""
    jit_level: Literal["O0", "O1", "O2"] = setting("O0", needs="mode == graph")
    """Graph optimization: O0 none, O1 fusion, O2 CANN's engine (Ascend only)."""
    flash_attention: bool = True
    """Use Ascend's fused attention with mixed_precision fp16 and bf16."""
    data_sink: bool = True
    """Copy batches to the NPU while it computes the previous ones."""


class Hpu(Section):
    """Settings of device hpu (Intel Gaudi), for runtime torch."""

    mode: Literal["eager", "lazy"] | None = None
    """Execution: eager runs operators one by one, or with torch.compile (see `compile`); lazy
    collects graphs up to each mark_step; null: PT_HPU_LAZY_MODE, or eager."""
    graphs: bool = False
    """Record and replay forward and backward as HPU graphs (mode lazy)."""
    max_graphs: PositiveInt = 10
    """Maximum number of cached HPU graphs, one per batch shape."""
    fused: bool = True
    """Use Habana's FusedAdamW and FusedClipNorm if they are installed."""
    recipe_cache_megabytes: PositiveInt = 1024
    """Maximum size of the compiled graphs in the store, in MB."""
    gpu_migration: bool = False
    """Load Habana's GPU migration toolkit, which maps cuda calls to hpu."""

    def faults(self) -> Iterator[str]:
        if self.graphs and self.mode == "eager":
            yield "graphs requires mode: lazy"
