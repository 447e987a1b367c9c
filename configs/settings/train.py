"""Settings of the section `train`: weights, objective, optimizer, hardware and monitoring.

The cache key of the weights contains those that `key_settings` selects.
"""

from __future__ import annotations

import fractions
import math
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PositiveInt,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from configs.settings.base_section import Fraction, Section
from configs.settings.train_parts import (
    BestCheckpoint,
    HoldoutLoss,
    Hpu,
    Lora,
    LossScale,
    MindSpore,
    OnDivergence,
    Profile,
    TimestepSampling,
    Wandb,
)

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class Train(Section):
    """The training run."""

    method: Literal["full", "lora"] = Field(
        "full", description="Train all weights of the denoiser (full) or LoRA adapters (lora)."
    )
    lora: Lora = Lora()
    train_text_encoder: bool = Field(
        False, description="Also train the CLIP text encoders, by the same method."
    )
    text_encoder_lr: float | None = Field(
        None, gt=0, description="Peak learning rate of the text encoders; null: learning_rate."
    )
    init: Literal["base", "random"] = Field(
        "base", description="Initial denoiser weights: the base's, or random ones."
    )
    denoiser_config: str | None = Field(
        None,
        description="For init random: another config.json of the base's denoiser class; null: the "
        "base's.",
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
        None,
        gt=0,
        description="Passes over the training samples, instead of `steps`. Of the two, a recipe "
        "that sets one does not inherit the other.",
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="Seed of the order, noise, timesteps, dropout and new weights.",
    )
    global_batch_size: PositiveInt = Field(
        16, description="Samples per optimizer step over all devices."
    )
    micro_batch_size: PositiveInt | None = Field(
        None,
        description="Samples per forward pass of a process, which has one GPU or NPU, or all "
        "chips of a TPU host; null: its whole share. Smaller values accumulate gradients.",
    )

    optimizer: Literal["adamw", "adamw_8bit", "adafactor"] = Field(
        "adamw",
        description="AdamW (arXiv 1711.05101), AdamW with 8-bit moments (arXiv 2110.02861), or "
        "Adafactor (arXiv 1804.04235) at an absolute learning rate.",
    )
    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate.")
    lr_scheduler: Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial"] = (
        Field(
            "constant",
            description="Learning rate schedule after warm-up; all but constant fall "
            "towards `lr_min_ratio`, which the step after the last would have.",
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
    ema_decay: Decay | None = Field(
        None,
        description="Decay per step of the published moving average of the weights (EMA); null: "
        "none.",
    )
    ema_every_n_steps: PositiveInt = Field(
        1,
        description="Steps between updates of the average, each of which decays it by ema_decay to "
        "this power; the last step updates it, too. It saves memory traffic on runtimes torch and "
        "mindspore.",
    )

    prediction_type: Literal["epsilon", "v_prediction", "sample", "flow"] | None = Field(
        None, description="Prediction target of the denoiser; null: that of the base's scheduler."
    )
    zero_terminal_snr: bool | None = Field(
        None,
        description="Rescale the noise schedule to zero terminal SNR (arXiv 2305.08891); null: "
        "that of the base's scheduler.",
    )
    snr_gamma: float | None = Field(
        None, gt=0, description="Gamma of min-SNR loss weighting (arXiv 2303.09556 uses 5.0)."
    )
    debiased_estimation_loss: bool = Field(
        False, description="Weight the loss by 1 / sqrt(SNR) (arXiv 2310.08442); no snr_gamma."
    )
    weighting_scheme: Literal["none", "sigma_sqrt", "cosmap"] = Field(
        "none", description="Loss weighting of flow matching (arXiv 2403.03206)."
    )
    noise_offset: float = Field(
        0.0, ge=0, description="Scale of a random per-channel offset of the noise; 0: none."
    )
    input_perturbation: float = Field(
        0.0, ge=0, description="Scale of extra noise on the model's input (arXiv 2301.11706)."
    )
    timesteps: TimestepSampling = TimestepSampling()
    guidance_scale: float = Field(
        1.0,
        ge=0,
        description="Guidance scale that a guidance-distilled denoiser, such as FLUX.1 dev, is "
        "given in training.",
    )
    caption_dropout_rate: Fraction = Field(
        0.0, description="Fraction of samples, 0 to 1, with an empty caption."
    )

    mixed_precision: Literal["no", "bf16", "fp16"] = Field(
        "no",
        description="Precision of forward and backward; trained weights stay float32. fp16 "
        "requires runtime mindspore.",
    )
    loss_scale: LossScale = LossScale()
    gradient_checkpointing: Literal["none", "blocks", "selective"] = Field(
        "none",
        description="What the backward pass recomputes, to save memory: all activations of each "
        "block (blocks), or all but the outputs of convolutions, of products with weights and of "
        "PyTorch's and TPUs' attention kernels (selective). Compiled blocks treat selective as "
        "none.",
    )
    compile: Literal["auto", "none", "blocks", "denoiser"] = Field(
        "auto",
        description="What torch.compile compiles: the repeated blocks, each as one program, or the "
        "whole denoiser; auto: blocks on CUDA, else none.",
    )
    attention: Literal["auto", "flash", "flash_3", "cudnn", "efficient", "math"] = Field(
        "auto",
        description="Attention kernel on CUDA, as torch.nn.attention.SDPBackend names it; "
        "flash_3: FlashAttention 3, which is not included, on Hopper; auto: PyTorch's choice.",
    )
    allow_tf32: bool = Field(
        False,
        description="Compute float32 products and convolutions in TF32, which has 10 bits of "
        "mantissa. It requires CUDA and mixed_precision: no.",
    )
    cuda_graphs: bool = Field(
        False,
        description="Replay each forward and backward pass as one CUDA graph. It is faster where "
        "the GPU computes kernels faster than Python starts them. Each shape of picture has its "
        "own graph and gradients; the activations stay reserved.",
    )
    deterministic: bool | None = Field(
        None,
        description="Use deterministic kernels only, so that a resumed run repeats every bit; "
        "null: true except on CUDA, where it costs 15% of the speed.",
    )
    device: str = Field(
        "auto", description="Device: auto, cpu, cuda[:N], mps, npu[:N], hpu[:N], tpu or ascend[:N]."
    )
    processes: PositiveInt = Field(
        1, description="Training processes on this machine, one per GPU or NPU."
    )
    mindspore: MindSpore = MindSpore()
    hpu: Hpu = Hpu()
    fsdp: PositiveInt | Literal["all"] = Field(
        1,
        description="Devices per shard group of FSDP, a divisor of their number; 1: no sharding. "
        "Runtime torch has a device per process. Device npu supports 1 and `all`; device hpu and "
        "runtime mindspore 1.",
    )

    shuffle_window: PositiveInt = Field(
        4, description="Shards whose samples are shuffled together."
    )
    prefetch: PositiveInt = Field(2, description="Batches to prepare ahead of the device.")
    cache_bytes: PositiveInt = Field(
        20 * 2**30,
        description="Maximum size of the local cache of a remote store, in bytes; fewer on a "
        "small disk.",
    )

    checkpointing_steps: PositiveInt = Field(500, description="Steps between checkpoints.")
    checkpoints_total_limit: PositiveInt = Field(
        2, description="Maximum number of checkpoints; the oldest are deleted."
    )
    keep_best: int = Field(
        0,
        ge=0,
        description="Extra checkpoints to keep, the best by `best_checkpoint` or, without it, by "
        "held-out loss.",
    )
    best_checkpoint: BestCheckpoint | None = Field(
        None,
        description="Publish the best checkpoint, and stop early; null: publish the last step.",
    )
    checkpoint_shard_bytes: PositiveInt = Field(
        10**9, description="Maximum size of a checkpoint file, in bytes; larger ones are split."
    )
    grace_seconds: float = Field(
        60.0, gt=0, description="Maximum time for a checkpoint after a cancellation, in seconds."
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

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _refuse_flag(cls, given: Any) -> Any:
        if isinstance(given, bool):  # as in diffusers' scripts and kohya
            raise ValueError(f"it is no flag: set {'blocks' if given else 'none'}")
        return given

    @model_serializer(mode="wrap")
    def _without_unused_steps(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A resolved recipe with `epochs` has no `steps`, since the two exclude each other."""
        values: dict[str, Any] = serialize(self)
        if self.epochs is not None:
            values.pop("steps", None)
        return values

    @model_validator(mode="after")
    def _check_combinations(self) -> Train:
        if self.snr_gamma is not None and self.debiased_estimation_loss:
            raise ValueError("snr_gamma and debiased_estimation_loss exclude each other: set one")
        if self.mixed_precision != "fp16" and self.loss_scale != LossScale():
            raise ValueError("loss_scale requires mixed_precision: fp16")
        if self.method == "lora" and self.init == "random":
            raise ValueError("init: random requires method: full")
        if self.denoiser_config is not None and self.init != "random":
            raise ValueError("denoiser_config requires init: random")
        if self.text_encoder_lr is not None and not self.train_text_encoder:
            raise ValueError("text_encoder_lr requires train_text_encoder: true")
        if self.epochs is not None:
            if "steps" in self.model_fields_set:
                raise ValueError("epochs and steps exclude each other: remove one of them")
        elif self.profile.steps and self.profile.start + self.profile.steps > self.steps:
            raise ValueError(
                f"profile: steps {self.profile.start} to {self.profile.start + self.profile.steps} "
                f"exceed the run's {self.steps}"
            )
        self._check_checkpoint_scores()
        self._check_cuda_graphs()
        if self.attention in ("flash", "flash_3", "cudnn") and self.mixed_precision == "no":
            raise ValueError(f"attention: {self.attention} requires mixed_precision: bf16")
        if self.attention == "cudnn" and self.deterministic:
            raise ValueError("attention: cudnn requires deterministic: false")
        if self.global_batch_size % self.processes:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} must be a multiple of processes "
                f"({self.processes})"
            )
        if self.fsdp != 1 and self.optimizer != "adamw":
            raise ValueError(
                f"optimizer {self.optimizer} requires unsharded weights: set fsdp to 1"
            )
        if self.fsdp != 1 and self.method == "lora" and self.lora.base_precision is not None:
            raise ValueError("lora.base_precision requires unsharded weights: set fsdp to 1")
        return self

    def _check_cuda_graphs(self) -> None:
        """Raise ValueError for settings whose step has operations that CUDA cannot capture."""
        if not self.cuda_graphs:
            return
        if self.processes > 1:
            raise ValueError("cuda_graphs requires processes: 1")
        if self.gradient_checkpointing != "none":
            raise ValueError("cuda_graphs requires gradient_checkpointing: none")
        if self.method == "lora" and self.lora.dropout:
            raise ValueError("cuda_graphs requires lora.dropout: 0")

    def _check_checkpoint_scores(self) -> None:
        """Raise ValueError if a checkpoint would have no score for the rule that ranks it."""
        rule = self.best_checkpoint
        if rule is None and not self.keep_best:
            return
        if self.ema_decay is not None and self.checkpointing_steps % self.ema_every_n_steps:
            raise ValueError(
                f"{'keep_best' if rule is None else 'best_checkpoint'} compares averages that "
                "changed: ema_every_n_steps must divide checkpointing_steps"
            )
        name = "holdout_loss.every_n_steps"
        interval = self.holdout_loss.every_n_steps
        if rule is not None and rule.by_samples:
            name = "sample_every_n_steps"
            interval = self.sample_every_n_steps
        if self.checkpointing_steps % (interval or 2**63):
            raise ValueError(
                f"{'keep_best' if rule is None else 'best_checkpoint'} requires a score per "
                f"checkpoint: {name} must divide checkpointing_steps"
            )

    def with_steps(self, samples: int) -> Train:
        """The settings with `epochs` converted to `steps`, rounded up, for `samples` samples."""
        if self.epochs is None:
            return self
        epochs = fractions.Fraction(str(self.epochs))  # as floats, 1.1 * 100 > 110
        steps = max(1, math.ceil(epochs * samples / self.global_batch_size))
        return self.model_copy(update={"steps": steps, "epochs": None})

    def micro_batch(self, ranks: int) -> int:
        """Samples of a micro-batch on each of `ranks` processes; the last one may have fewer."""
        share = self.global_batch_size // ranks
        return min(self.micro_batch_size or share, share)

    @property
    def kept_best(self) -> int:
        """Number of best checkpoints that are kept beside the newest ones."""
        return max(self.keep_best, int(self.best_checkpoint is not None))

    @property
    def holdout_loss_inputs(self) -> dict[str, float]:
        """The settings that a held-out loss depends on; guidance where it is not the default."""
        guidance = {} if self.guidance_scale == 1 else {"guidance_scale": self.guidance_scale}
        return {"noise_offset": self.noise_offset, **guidance}

    @property
    def compute_dtype(self) -> str:
        """The dtype name of forward and backward, as in PyTorch, JAX and MindSpore."""
        return {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}[self.mixed_precision]

    @property
    def weights_depend_on_steps(self) -> bool:
        """Whether the weights of a step differ between runs that differ in `steps` alone.

        The learning rate of other schedules depends on it, as does a last update of the average.
        """
        return self.lr_scheduler != "constant" or self.ema_every_n_steps > 1

    @property
    def product_dtype(self) -> str:
        """As compute_dtype, or `tf32`: the arithmetic of products and convolutions."""
        is_tf32 = self.allow_tf32 and self.mixed_precision == "no"
        return "tf32" if is_tf32 else self.compute_dtype


#: Settings that do not affect the trained weights; a resumed run may change them.
NOT_IN_KEY = frozenset(
    {
        "attention",
        "cache_bytes",
        "checkpointing_steps",
        "checkpoint_shard_bytes",
        "compile",
        "cuda_graphs",
        "deterministic",
        "device",
        "divergence",  # but for the threshold that `factor` sets
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
#: Settings that keys contain if they differ from their defaults; other keys remain those of before.
ADDED_LATER = ("allow_tf32", "ema_every_n_steps")


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
    if settings.guidance_scale == 1:  # most models have no such input
        excluded.add("guidance_scale")
    found = _dump(settings, excluded)
    rule = settings.best_checkpoint
    if rule is None:
        del found["best_checkpoint"]
        return found
    # The candidates, and what their scores depend on.
    found = _dump(settings, excluded - {"checkpointing_steps"})
    found["best_checkpoint"]["mode"] = "min" if rule.lower_is_better else "max"
    if not rule.by_samples:
        found["holdout_loss"] = settings.holdout_loss.model_dump(exclude={"every_n_steps"})
    return found


def _dump(settings: Train, excluded: set[str]) -> dict[str, Any]:
    found = settings.model_dump(mode="json", exclude=excluded)
    if not settings.timesteps.resolution_shift:  # diffusion has none
        del found["timesteps"]["resolution_shift"]
    if settings.optimizer == "adafactor":  # its rate was relative to a weight's size once
        found["optimizer"] = "adafactor, absolute rate"
    if settings.divergence.factor is not None:
        # A finished run without it may have passed the threshold. `action` is no part, so that a
        # stopped run can continue with `skip`.
        found["divergence"] = settings.divergence.model_dump(include={"factor", "patience"})
    if settings.method == "lora" and settings.lora.base_precision is None:
        del found["lora"]["base_precision"]
    for name in ADDED_LATER:
        if found[name] == Train.model_fields[name].default:
            del found[name]
    return found
