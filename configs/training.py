"""Settings of the section `train`: weights, objective, optimizer, hardware and monitoring.

`key_settings` returns those that affect the trained weights.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from configs.section import Fraction, Section

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


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

    @model_validator(mode="after")
    def _bias_has_effect(self) -> TimestepSampling:
        without = {
            "none": ("bias_multiplier", "bias_portion", "bias_begin", "bias_end"),
            "earlier": ("bias_begin", "bias_end"),
            "later": ("bias_begin", "bias_end"),
            "range": ("bias_portion",),
        }
        self.refuse_changed(without[self.bias_strategy], f"bias_strategy: {self.bias_strategy}")
        return self


class HoldoutLoss(Section):
    """The loss on held-out samples with fixed noise, during training."""

    every_n_steps: int = Field(0, ge=0, description="Interval in steps; 0: never.")
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
        "pynative",
        description="Run forward and backward operator by operator (pynative) or as a compiled "
        "graph.",
    )
    jit_level: Literal["O0", "O1", "O2"] = Field(
        "O0",
        description="Optimization of the graph: O0 none, O1 operator fusion, O2 CANN's graph "
        "engine (Ascend only).",
    )
    flash_attention: bool = Field(
        True, description="Use Ascend's fused attention with mixed_precision fp16 and bf16."
    )
    data_sink: bool = Field(
        True, description="Copy batches to the NPU while it computes the previous ones."
    )

    @model_validator(mode="after")
    def _mode_has_it(self) -> MindSpore:
        if self.mode == "pynative":
            self.refuse_changed(("jit_level",), "mode: pynative")
        return self


class Hpu(Section):
    """Settings of device hpu (Intel Gaudi), for runtime torch."""

    mode: Literal["eager", "lazy"] | None = Field(
        None,
        description="eager runs operators one by one, or with torch.compile (see `compile`); lazy "
        "collects them into graphs up to each mark_step. Null: PT_HPU_LAZY_MODE, else eager.",
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
    def _graphs_are_lazy(self) -> Hpu:
        if self.graphs and self.mode == "eager":
            raise ValueError("graphs is for mode: lazy")
        return self


class Wandb(Section):
    """Weights & Biases; WANDB_API_KEY holds its API key."""

    project: str = Field(description="Project of the runs.")
    entity: str | None = Field(None, description="User or team; null: the account's default.")
    mode: Literal["online", "offline"] = Field(
        "online", description="Upload the run, or write local files only (offline)."
    )


class Train(Section):
    """The training run."""

    method: Literal["full", "lora"] = Field(
        "full", description="Train all weights of the denoiser (full) or LoRA adapters (lora)."
    )
    lora: Lora = Lora()
    train_text_encoder: bool = Field(
        False,
        description="Also train the CLIP text encoders, by the same method; each step then encodes "
        "its captions.",
    )
    text_encoder_lr: float | None = Field(
        None, gt=0, description="Peak learning rate of the text encoders; null: learning_rate."
    )
    init: Literal["base", "random"] = Field(
        "base", description="Initial denoiser weights: the base's, or random ones."
    )
    denoiser_config: str | None = Field(
        None,
        description="For init random: config.json of another denoiser of the base's class; null: "
        "the base's config.",
    )
    inpainting: bool = Field(
        False,
        description="Train an inpainting UNet: nine input channels, with the mask and the latents "
        "of the masked picture. Missing channels are added with zero weights.",
    )
    aesthetic_score: bool = Field(
        False,
        description="Condition the UNet on each picture's aesthetic score, as a class label. "
        "Missing layers are added and have no effect at first.",
    )
    steps: PositiveInt = Field(1000, description="Optimizer steps.")
    epochs: float | None = Field(
        None, gt=0, description="Passes over the training samples, instead of `steps`; null: none."
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="Seed of sample order, noise, timesteps, dropout and new weights.",
    )
    global_batch_size: PositiveInt = Field(
        16, description="Samples per optimizer step over all devices."
    )
    micro_batch_size: PositiveInt | None = Field(
        None,
        description="Samples per forward pass and device; null: the device's whole share. Smaller "
        "values accumulate gradients.",
    )

    optimizer: Literal["adamw", "adamw_8bit", "adafactor"] = Field(
        "adamw",
        description="AdamW (arXiv 1711.05101), AdamW with 8-bit moments (arXiv 2110.02861), or "
        "Adafactor (arXiv 1804.04235).",
    )
    learning_rate: float = Field(
        1e-5, gt=0, description="Peak learning rate; Adafactor's is relative to a weight's RMS."
    )
    lr_scheduler: Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial"] = (
        Field(
            "constant",
            description="Learning rate schedule after warm-up; all but constant end at "
            "`lr_min_ratio`.",
        )
    )
    lr_min_ratio: Fraction = Field(
        0.0, description="Final learning rate as a fraction of the peak, 0 to 1."
    )
    lr_num_cycles: PositiveInt = Field(1, description="Cycles of cosine_with_restarts.")
    lr_power: float = Field(1.0, gt=0, description="Exponent of the polynomial schedule.")
    lr_warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up from 0.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay.")
    adam_betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="AdamW's beta1 and beta2.")
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    max_grad_norm: float | None = Field(
        1.0, gt=0, description="Maximum L2 norm of the gradient; null: no clipping."
    )
    ema_decay: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Decay of the exponential moving average of the weights, which is published; "
        "null: none.",
    )

    prediction_type: Literal["epsilon", "v_prediction", "sample", "flow"] | None = Field(
        None, description="Prediction target of the denoiser; null: that of the base's scheduler."
    )
    zero_terminal_snr: bool | None = Field(
        None,
        description="Rescale the noise schedule to zero terminal SNR (arXiv 2305.08891); null: as "
        "the base's scheduler.",
    )
    snr_gamma: float | None = Field(
        None,
        gt=0,
        description="Gamma of min-SNR loss weighting (arXiv 2303.09556, which uses 5.0); null: "
        "none.",
    )
    debiased_estimation_loss: bool = Field(
        False,
        description="Weight the loss by 1 / sqrt(SNR) (arXiv 2310.08442); excludes snr_gamma.",
    )
    weighting_scheme: Literal["none", "sigma_sqrt", "cosmap"] = Field(
        "none", description="Loss weighting of flow matching (arXiv 2403.03206)."
    )
    noise_offset: float = Field(
        0.0, ge=0, description="Scale of a random per-channel offset of the noise; 0: none."
    )
    input_perturbation: float = Field(
        0.0,
        ge=0,
        description="Scale of additional noise on the model's input (arXiv 2301.11706); 0: none.",
    )
    timesteps: TimestepSampling = TimestepSampling()
    caption_dropout_rate: Fraction = Field(
        0.0, description="Fraction of samples, 0 to 1, with an empty caption."
    )

    mixed_precision: Literal["no", "bf16", "fp16"] = Field(
        "no",
        description="Precision of forward and backward; trained weights stay float32. fp16 "
        "requires runtime mindspore.",
    )
    loss_scale: LossScale = LossScale()
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass, to save memory."
    )
    compile: bool = Field(False, description="Compile the denoiser with torch.compile.")
    device: str = Field(
        "auto", description="Device: auto, cpu, cuda[:N], npu[:N], hpu[:N], tpu or ascend[:N]."
    )
    processes: PositiveInt = Field(
        1, description="Training processes on this machine, one per GPU or NPU."
    )
    mindspore: MindSpore = MindSpore()
    hpu: Hpu = Hpu()
    fsdp: PositiveInt | Literal["all"] = Field(
        1,
        description="Devices per shard group of FSDP; 1: no sharding. Runtime torch supports 1 and "
        "`all` (or the number of processes), jax and xla any divisor of the devices.",
    )

    shuffle_window: PositiveInt = Field(
        4, description="Number of shards whose samples are shuffled together."
    )
    prefetch: PositiveInt = Field(2, description="Batches to prepare ahead of the device.")
    cache_bytes: PositiveInt = Field(
        20 * 2**30, description="Maximum size of the local cache of a remote store, in bytes."
    )

    checkpointing_steps: PositiveInt = Field(500, description="Steps between checkpoints.")
    checkpoints_total_limit: PositiveInt = Field(
        2, description="Maximum number of checkpoints; the oldest are deleted."
    )
    keep_best: int = Field(
        0, ge=0, description="Number of additional checkpoints with the lowest held-out loss."
    )
    checkpoint_shard_bytes: PositiveInt = Field(
        5 * 10**9, description="Maximum size of a checkpoint file, in bytes; larger ones are split."
    )
    grace_seconds: float = Field(
        60.0, gt=0, description="Time for a checkpoint after a cancellation, in seconds."
    )

    logging_steps: PositiveInt = Field(10, description="Steps between log lines with metrics.")
    sample_every_n_steps: int = Field(
        0, ge=0, description="Steps between sample pictures; 0: no samples."
    )
    holdout_loss: HoldoutLoss = HoldoutLoss()
    divergence: OnDivergence = OnDivergence()
    profile: Profile = Profile()
    peak_tflops: float | None = Field(
        None, gt=0, description="Peak of one chip in TFLOP/s, for MFU; null: the built-in table."
    )
    wandb: Wandb | None = Field(None, description="Weights & Biases; null: not used.")

    @model_validator(mode="after")
    def _goes_together(self) -> Train:
        if self.snr_gamma is not None and self.debiased_estimation_loss:
            raise ValueError("snr_gamma and debiased_estimation_loss exclude each other: set one")
        if self.mixed_precision != "fp16" and self.loss_scale != LossScale():
            raise ValueError("loss_scale is for mixed_precision: fp16")
        if self.method == "lora" and self.init == "random":
            raise ValueError("init: random trains all weights: method must be full")
        if self.denoiser_config is not None and self.init != "random":
            raise ValueError("denoiser_config is for init: random")
        if self.text_encoder_lr is not None and not self.train_text_encoder:
            raise ValueError("text_encoder_lr is for train_text_encoder: true")
        if self.epochs is not None:
            self.refuse_changed(("steps",), f"epochs: {self.epochs:g}")
        elif self.profile.steps and self.profile.start + self.profile.steps > self.steps:
            raise ValueError(
                f"profile: steps {self.profile.start} to {self.profile.start + self.profile.steps} "
                f"exceed the run's {self.steps}"
            )
        if self.keep_best and self.checkpointing_steps % (self.holdout_loss.every_n_steps or 2**63):
            raise ValueError(
                "keep_best needs a held-out loss at every checkpoint: holdout_loss.every_n_steps "
                "must divide checkpointing_steps"
            )
        if self.global_batch_size % self.processes:
            raise ValueError(
                f"processes: {self.processes} does not divide global_batch_size "
                f"({self.global_batch_size}): make that a multiple"
            )
        if self.fsdp != 1 and self.optimizer != "adamw":
            raise ValueError(f"optimizer {self.optimizer} needs unsharded arrays: fsdp must be 1")
        if self.optimizer == "adafactor":
            self.refuse_changed(("adam_betas", "adam_epsilon"), "optimizer: adafactor")
        return self

    def with_steps(self, samples: int) -> Train:
        """The settings with `epochs` converted to `steps`, rounded up, for `samples` samples."""
        if self.epochs is None:
            return self
        steps = max(1, math.ceil(self.epochs * samples / self.global_batch_size))
        return self.model_copy(update={"steps": steps, "epochs": None})

    @property
    def compute_dtype(self) -> str:
        """The dtype name of forward and backward, as in PyTorch, JAX and MindSpore."""
        return {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}[self.mixed_precision]


#: Settings that do not affect the trained weights; a resumed run may change them.
NOT_IN_KEY = frozenset(
    {
        "cache_bytes",
        "checkpointing_steps",
        "checkpoint_shard_bytes",
        "compile",
        "device",
        "grace_seconds",
        "gradient_checkpointing",
        "hpu",
        "keep_best",
        "checkpoints_total_limit",
        "logging_steps",
        "micro_batch_size",
        "mindspore",
        "fsdp",
        "peak_tflops",
        "prefetch",
        "processes",
        "profile",
        "sample_every_n_steps",
        "holdout_loss",
        "wandb",
    }
)


def key_settings(settings: Train) -> dict[str, Any]:
    """The settings that affect the trained weights, without those that have no effect here."""
    excluded = set(NOT_IN_KEY)
    if settings.method == "full":
        excluded.add("lora")
    elif settings.lora.dropout:  # its random draws depend on both settings
        excluded -= {"micro_batch_size", "processes"}
    if settings.compute_dtype != "float16":
        excluded.add("loss_scale")
    if settings.lr_scheduler == "constant":
        excluded.add("lr_min_ratio")
    if settings.lr_scheduler != "cosine_with_restarts":
        excluded.add("lr_num_cycles")
    if settings.lr_scheduler != "polynomial":
        excluded.add("lr_power")
    return settings.model_dump(mode="json", exclude=excluded)
