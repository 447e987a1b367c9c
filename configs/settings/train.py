"""Settings of the section `train`: weights, objective, optimizer, hardware and monitoring."""

import fractions
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_serializer

from configs.settings import train_parts
from configs.settings.base_section import Fraction, Section, setting

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
#: Optimizers with AdamW's betas and epsilon; the others have those of their papers.
WITH_ADAM = " or ".join(
    f"optimizer == {name}"
    for name in ("adamw", "adamw_8bit", "adamw_schedule_free", "muon", "prodigy")
)


class Train(Section):
    """The training run."""

    method: Literal["full", "lora", "controlnet"] = setting(
        "full",
        fixed_by_weights=True,
        plan="gpu tpu",
        aka="network_module lora_type model_type (KS): `full`, `lora` or `controlnet`",
    )
    """Train all weights of the denoiser (full), LoRA adapters (lora), or a ControlNet beside the
    frozen denoiser, whose control pictures are those of `source.control` (controlnet)."""
    lora: train_parts.Lora = setting(
        train_parts.Lora(), needs="method == lora", fixed_by_weights=True, plan="gpu tpu"
    )
    controlnet: train_parts.ControlNet = setting(
        train_parts.ControlNet(),
        needs="method == controlnet",
        in_key_with="method == controlnet",
        fixed_by_weights=True,
        plan="gpu",
    )
    train_text_encoder: bool = setting(
        False, fixed_by_weights=True, plan="gpu tpu", aka="train_text_encoder (DKS)"
    )
    """Also train the CLIP text encoders, by the same method."""
    text_encoder_lr: PositiveFloat | None = setting(
        None, aka="text_encoder_lr learning_rate_te1 learning_rate_te2 (DK)"
    )
    """Peak learning rate of the text encoders; null: learning_rate."""
    init: Literal["base", "random"] = setting("base", plan="gpu")
    """Initial denoiser weights: the base's, or random ones."""
    denoiser_config: str | None = setting(None, plan="gpu")
    """For init random: another config.json of the base's denoiser class; null: the base's."""
    inpainting: bool = setting(False, fixed_by_weights=True, plan="gpu tpu")
    """Train an inpainting UNet: nine input channels, with the mask and the latents of the masked
    picture. Missing channels are added with zero weights."""
    aesthetic_score: bool = setting(False, fixed_by_weights=True, plan="gpu tpu")
    """Condition the UNet on each picture's aesthetic score, as a class label. Missing layers are
    added and have no effect at first."""
    steps: PositiveInt = setting(1000, plan="run", aka=("max_train_steps (DKS)", "max_steps (T)"))
    """Optimizer steps."""
    epochs: PositiveFloat | None = setting(
        None,
        plan="run",
        aka="num_train_epochs max_train_epochs (DKS): instead of the `train.steps` of the "
        "extended recipe",
    )
    """Passes over the training samples, instead of `steps`. Of the two, a recipe that sets one does
    not inherit the other."""
    seed: int = setting(0, ge=0, lt=2**63, aka="seed (DKS)")
    """Seed of the order, noise, timesteps, dropout and new weights."""
    global_batch_size: PositiveInt = setting(
        16,
        plan="run",
        aka="gradient_accumulation_steps (DKS): train_batch_size x gradient_accumulation_steps x "
        "processes",
    )
    """Samples per optimizer step over all devices."""
    micro_batch_size: PositiveInt | None = setting(
        None,
        not_in_key="execution",
        in_key_with="lora.dropout",
        plan="run",
        aka="train_batch_size (DKS): images per forward pass",
    )
    """Samples per forward pass of a process, which has one GPU or NPU, or all chips of a TPU host;
    null: its whole share. Smaller values accumulate gradients."""

    optimizer: Literal[
        "adamw",
        "adamw_8bit",
        "adamw_schedule_free",
        "adafactor",
        "came",
        "lion",
        "lion_8bit",
        "muon",
        "prodigy",
    ] = setting(
        "adamw",
        plan="gpu tpu",
        aka=(
            "optimizer_type (K): `adafactor` is theirs with `scale_parameter=False "
            "relative_step=False`; `prodigy` is theirs with `use_bias_correction=True "
            "safeguard_warmup=True`",
            "use_8bit_adam (DK): `adamw_8bit`",
            "use_lion_optimizer (K): `lion`",
        ),
    )
    """AdamW (arXiv 1711.05101); with 8-bit moments (arXiv 2110.02861); schedule-free (arXiv
    2405.15682), which publishes its own average; Adafactor (arXiv 1804.04235) at an absolute
    learning rate; CAME (arXiv 2307.02047); Lion (arXiv 2302.06675); Muon for matrices at AdamW's
    learning rate (arXiv 2502.16982), with AdamW for the rest; or Prodigy (arXiv 2306.06101), whose
    learning_rate is a factor, usually 1."""
    fused_backward: bool = setting(
        False, not_in_key="execution", plan="gpu", aka="fused_backward_pass (K)"
    )
    """Update each weight within the backward pass, and free its gradient at once. It requires
    max_grad_norm: null, one micro-batch per step and one process. The result does not change."""
    learning_rate: PositiveFloat = setting(1e-5, aka=("learning_rate unet_lr (DKS)", "lr (P)"))
    """Peak learning rate."""
    lr_scheduler: Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial"] = (
        setting(
            "constant",
            aka="lr_scheduler (DKS): `constant_with_warmup` is `constant` with `lr_warmup_steps`",
        )
    )
    """Learning rate schedule after warm-up; all but constant fall towards `lr_min_ratio`, which the
    step after the last would have."""
    lr_min_ratio: Fraction = setting(
        0.0,
        needs="lr_scheduler != constant",
        aka="lr_end lr_scheduler_min_lr_ratio (KS): fraction of the peak",
    )
    """Final learning rate as a fraction of the peak, 0 to 1."""
    lr_num_cycles: PositiveInt = setting(
        1,
        needs="lr_scheduler == cosine_with_restarts",
        aka="lr_num_cycles lr_scheduler_num_cycles (DKS)",
    )
    """Cycles of cosine_with_restarts."""
    lr_power: PositiveFloat = setting(
        1.0, needs="lr_scheduler == polynomial", aka="lr_power lr_scheduler_power (DKS)"
    )
    """Exponent of the polynomial schedule."""
    lr_warmup_steps: int = setting(0, ge=0, aka="lr_warmup_steps (DKS)")
    """Steps of linear warm-up from 0."""
    weight_decay: float = setting(0.01, ge=0, aka="adam_weight_decay (DS)")
    """Decoupled weight decay."""
    adam_betas: tuple[Decay, Decay] = setting(
        (0.9, 0.999), needs=WITH_ADAM, aka="adam_beta1 adam_beta2 (DS)"
    )
    """AdamW's beta1 and beta2."""
    adam_epsilon: PositiveFloat = setting(1e-8, needs=WITH_ADAM, aka="adam_epsilon (DS)")
    """AdamW's epsilon."""
    max_grad_norm: PositiveFloat | None = setting(1.0, plan="gpu tpu", aka="max_grad_norm (DKS)")
    """Maximum L2 norm of the gradient; null: no clipping."""
    ema_decay: Decay | None = setting(
        None, plan="tpu run", aka="use_ema (DS): null keeps no average"
    )
    """Decay per step of the published moving average of the weights (EMA); null: none."""
    ema_every_n_steps: PositiveInt = setting(
        1, needs="ema_decay != null", aka="ema_update_interval (S)"
    )
    """Steps between updates of the average, each of which decays it by ema_decay to this power; the
    last step updates it, too. It saves memory traffic on runtimes torch and mindspore."""

    prediction_type: Literal["epsilon", "v_prediction", "sample", "flow"] | None = setting(
        None,
        fixed_by_weights=True,
        aka=("prediction_type (DS)", "v_parameterization (K): `v_prediction`"),
    )
    """Prediction target of the denoiser; null: that of the base's scheduler."""
    zero_terminal_snr: bool | None = setting(
        None, fixed_by_weights=True, aka="rescale_betas_zero_snr zero_terminal_snr (DKS)"
    )
    """Rescale the noise schedule to zero terminal SNR (arXiv 2305.08891); null: that of the base's
    scheduler."""
    snr_gamma: PositiveFloat | None = setting(None, aka="snr_gamma min_snr_gamma (DKS)")
    """Gamma of min-SNR loss weighting (arXiv 2303.09556 uses 5.0)."""
    debiased_estimation_loss: bool = setting(
        False,
        aka="debiased_estimation_loss (K): of v-prediction sqrt(SNR) / (SNR + 1); kohya's is 1 / "
        "(SNR + 1)",
    )
    """Weight the loss by 1 / sqrt(SNR) (arXiv 2310.08442); no snr_gamma."""
    loss: Literal["mse", "huber", "smooth_l1"] = setting(
        "mse", in_key_with="loss != mse", aka="loss_type (DKS): `l2` is `mse`"
    )
    """Mean squared error; pseudo-Huber, which outliers affect less: of an error e, 2 d (sqrt(e^2 +
    d^2) - d); or smooth_l1, that divided by d. Section `huber` has d. Held-out losses are mse."""
    huber: train_parts.Huber = setting(
        train_parts.Huber(), needs="loss != mse", in_key_with="loss != mse"
    )
    weighting_scheme: Literal["none", "sigma_sqrt", "cosmap"] = setting(
        "none", aka="weighting_scheme (DK): sampling: train.timesteps"
    )
    """Loss weighting of flow matching (arXiv 2403.03206)."""
    noise_offset: float = setting(0.0, ge=0, aka="noise_offset (DKS)")
    """Scale of a random per-channel offset of the noise; 0: none."""
    input_perturbation: float = setting(0.0, ge=0, aka="input_perturbation ip_noise_gamma (DKS)")
    """Scale of extra noise on the model's input (arXiv 2301.11706)."""
    timesteps: train_parts.TimestepSampling = train_parts.TimestepSampling()
    masked_loss: train_parts.MaskedLoss | None = setting(
        None,
        in_key_with="masked_loss",
        aka="masked_loss masked_training (KO): `{}`, and `source.mask`",
    )
    """Train on what the masks of `source.mask` show; `{}`: on nothing else. null: on whole
    pictures."""
    guidance_scale: float = setting(
        1.0,
        ge=0,
        aka="guidance_scale flux_guidance_value (DKS): of the denoiser's guidance input, as of "
        "FLUX.1 dev",
    )
    """Guidance scale that a guidance-distilled denoiser, such as FLUX.1 dev, is given in
    training."""
    caption_dropout_rate: Fraction = setting(
        0.0, aka="proportion_empty_prompts caption_dropout_rate caption_dropout_probability (DKS)"
    )
    """Fraction of samples, 0 to 1, with an empty caption."""
    reference_dropout_rate: Fraction = setting(0.0, in_key_with="reference_dropout_rate")
    """Fraction of batches, 0 to 1, without their references: a batch has samples of one shape."""

    mixed_precision: Literal["no", "bf16", "fp16"] = setting(
        "no",
        plan="gpu tpu",
        aka=(
            "mixed_precision (DKS)",
            "full_bf16 full_fp16 (K): trained weights stay float32; a LoRA's frozen base has this "
            "precision",
        ),
    )
    """Precision of forward and backward; trained weights stay float32. fp16 requires runtime
    mindspore."""
    loss_scale: train_parts.LossScale = train_parts.LossScale()
    gradient_checkpointing: Literal["none", "blocks", "selective"] = setting(
        "none", not_in_key="execution", plan="gpu tpu", aka="gradient_checkpointing (DKS): `blocks`"
    )
    """What the backward pass recomputes, to save memory: all activations of each block (blocks), or
    all but the outputs of convolutions, of products with weights and of PyTorch's and TPUs'
    attention kernels (selective). Compiled blocks treat selective as none."""
    stream_blocks: int | Literal["auto"] = setting(
        0,
        not_in_key="execution",
        plan="run",
        aka="blocks_to_swap (K): copied to the device alone, never back",
    )
    """Number of the frozen denoiser's transformer blocks in pinned host memory, copied ahead to two
    buffers on the device; more than there are: all; auto: by the plan, the fewest that fit this
    machine's GPU, or 0. The result does not change. It requires method: lora and
    gradient_checkpointing: blocks. Runtime `torch`."""
    memory: Literal["auto"] | None = setting(None, not_in_key="execution")
    """auto: if the recipe does not fit this machine's GPU, take the fastest settings that `kiln
    plan` advises for it, except method: lora. Those that change the result, such as
    lora.base_precision, are kept for all later runs of the recipe in the store; null: the recipe's
    own. Runtime `torch`."""
    compile: Literal["auto", "none", "blocks", "denoiser"] = setting(
        "auto", not_in_key="execution", plan="tpu"
    )
    """What torch.compile compiles: the repeated blocks, each as one program, or the whole denoiser;
    auto: blocks on CUDA, else none."""
    attention: Literal["auto", "flash", "flash_3", "cudnn", "efficient", "math"] = setting(
        "auto",
        not_in_key="execution",
        aka="enable_xformers_memory_efficient_attention xformers sdpa attention_mechanism (DKS): "
        "PyTorch's kernels alone",
    )
    """Attention kernel on CUDA, as torch.nn.attention.SDPBackend names it; flash_3: FlashAttention
    3, which is not included, on Hopper; auto: PyTorch's choice."""
    allow_tf32: bool = setting(False, needs="mixed_precision == no", aka="allow_tf32 (D)")
    """Compute float32 products and convolutions in TF32, which has 10 bits of mantissa. It requires
    CUDA and mixed_precision: no."""
    cuda_graphs: bool = setting(False, not_in_key="execution")
    """Replay each forward and backward pass as one CUDA graph. It is faster where the GPU computes
    kernels faster than Python starts them. Each shape of picture has its own graph and gradients;
    the activations stay reserved."""
    deterministic: bool | None = setting(None, not_in_key="execution")
    """Use deterministic kernels only, so that a resumed run repeats every bit; null: true except on
    CUDA, where it costs 15% of the speed."""
    device: str = setting("auto", not_in_key="execution")
    """Device: auto, cpu, cuda[:N], mps, npu[:N], hpu[:N], tpu or ascend[:N]."""
    processes: PositiveInt = setting(
        1, not_in_key="execution", in_key_with="lora.dropout", plan="run", aka="num_processes (DKS)"
    )
    """Training processes of each host, one per GPU or NPU."""
    hosts: PositiveInt = setting(
        1,
        not_in_key="execution",
        in_key_with="lora.dropout",
        plan="run",
        exclude_if=lambda hosts: hosts == 1,  # keys of older recipes lack it
        aka="num_machines (D): of accelerate's configuration",
    )
    """Machines that train together, each with `processes`; the recipe's section of a cluster, such
    as slurm, says which."""
    mindspore: train_parts.MindSpore = setting(train_parts.MindSpore(), not_in_key="execution")
    hpu: train_parts.Hpu = setting(train_parts.Hpu(), not_in_key="execution")
    fsdp: PositiveInt | Literal["all"] = setting(
        1,
        not_in_key="execution",
        plan="tpu run",
        aka="use_fsdp fsdp_enable (DS): `all`, or devices per shard group",
    )
    """Devices per shard group of FSDP, a divisor of their number; 1: no sharding. Runtime torch has
    a device per process. Device npu supports 1 and `all`; device hpu and runtime mindspore 1."""

    shuffle_window: PositiveInt = 4
    """Shards whose samples are shuffled together."""
    prefetch: PositiveInt = setting(
        2, not_in_key="execution", aka="dataloader_num_workers max_data_loader_n_workers (DKS)"
    )
    """Batches to prepare ahead of the device."""
    cache_bytes: PositiveInt = setting(20 * 2**30, not_in_key="execution")
    """Maximum size of the local cache of a remote store, in bytes; fewer on a small disk."""

    checkpointing_steps: PositiveInt = setting(
        500,
        not_in_key="execution",
        in_key_with="best_checkpoint",
        aka="checkpointing_steps save_every_n_steps checkpoint_step_interval (DKS)",
    )
    """Steps between checkpoints."""
    checkpoints_total_limit: PositiveInt = setting(
        2, not_in_key="execution", aka="checkpoints_total_limit (DS)"
    )
    """Maximum number of checkpoints; the oldest are deleted."""
    keep_best: int = setting(0, ge=0, not_in_key="execution")
    """Extra checkpoints to keep, the best by `best_checkpoint` or, without it, by held-out loss."""
    best_checkpoint: train_parts.BestCheckpoint | None = setting(
        None,
        aka="load_best_model_at_end metric_for_best_model (T): `metric`; `{}` is the lowest "
        "held-out loss",
    )
    """Publish the best checkpoint, and stop early; null: publish the last step."""
    checkpoint_shard_bytes: PositiveInt = setting(10**9, not_in_key="execution")
    """Maximum size of a checkpoint file, in bytes; larger ones are split."""
    grace_seconds: PositiveFloat = setting(60.0, not_in_key="execution")
    """Maximum time for a checkpoint after a cancellation, in seconds."""

    logging_steps: PositiveInt = setting(10, not_in_key="execution")
    """Steps between log lines with metrics."""
    sample_every_n_steps: int = setting(
        0,
        ge=0,
        not_in_key="execution",
        plan="run",
        aka="validation_steps validation_epochs sample_every_n_steps sample_every_n_epochs (DKS)",
    )
    """Steps between sample pictures; 0: no samples."""
    holdout_loss: train_parts.HoldoutLoss = setting(
        train_parts.HoldoutLoss(),
        not_in_key="execution",
        in_key_with="best_checkpoint.metric == holdout_loss",
    )
    divergence: train_parts.OnDivergence = train_parts.OnDivergence()
    profile: train_parts.Profile = setting(train_parts.Profile(), not_in_key="execution")
    peak_tflops: PositiveFloat | None = setting(None, not_in_key="execution")
    """Peak of one chip in TFLOP/s, for MFU; null: the built-in table."""
    wandb: train_parts.Wandb | None = setting(
        None,
        not_in_key="execution",
        aka="report_to log_with (DKS): TensorBoard files are always written",
    )
    """Weights & Biases; null: not used."""

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _refuse_flag(cls, value: Any) -> Any:
        if isinstance(value, bool):  # as in diffusers' scripts and kohya
            raise ValueError(f"it is no flag: set {'blocks' if value else 'none'}")
        return value

    @model_serializer(mode="wrap")
    def _without_unused_steps(self, serialize: Callable[[Self], dict[str, Any]]) -> dict[str, Any]:
        """A resolved recipe with `epochs` has no `steps`, since the two exclude each other."""
        values = serialize(self)
        if self.epochs is not None:
            values.pop("steps", None)
        return values

    def faults(self) -> Iterator[str]:
        if self.snr_gamma is not None and self.debiased_estimation_loss:
            yield "snr_gamma and debiased_estimation_loss exclude each other: set one"
        if self.mixed_precision != "fp16" and self.loss_scale != train_parts.LossScale():
            yield "loss_scale requires mixed_precision: fp16"
        if self.method == "lora" and self.init == "random":
            yield "init: random requires method: full"
        if self.method == "controlnet":
            yield from self._faults_of_control()
        if self.denoiser_config is not None and self.init != "random":
            yield "denoiser_config requires init: random"
        if self.text_encoder_lr is not None and not self.train_text_encoder:
            yield "text_encoder_lr requires train_text_encoder: true"
        if self.masked_loss is not None and self.inpainting:
            yield "masked_loss requires inpainting: false, whose masks are others"
        if self.epochs is not None:
            if "steps" in self.model_fields_set:
                yield "epochs and steps exclude each other: remove one of them"
        elif self.profile.steps and self.profile.start + self.profile.steps > self.steps:
            yield (
                f"profile: steps {self.profile.start} to {self.profile.start + self.profile.steps} "
                f"exceed the run's {self.steps}"
            )
        yield from self._faults_of_checkpoint_scores()
        yield from self._faults_of_cuda_graphs()
        yield from self._faults_of_streaming()
        yield from self._faults_of_optimizer()
        if self.attention in ("flash", "flash_3", "cudnn") and self.mixed_precision == "no":
            yield f"attention: {self.attention} requires mixed_precision: bf16"
        if self.attention == "cudnn" and self.deterministic:
            yield "attention: cudnn requires deterministic: false"
        if self.global_batch_size % self.world_size:
            yield (
                f"global_batch_size {self.global_batch_size} must be a multiple of processes "
                f"({self.world_size}, on all hosts)"
            )
        group = self.shard_group
        if self.hosts > 1 and self.processes % group and group % self.processes:
            yield (
                f"fsdp: groups of {group} begin within a host of {self.processes} processes: set a "
                "divisor or a multiple of processes"
            )
        if self.fsdp != 1 and self.optimizer != "adamw":
            yield f"optimizer {self.optimizer} requires unsharded weights: set fsdp to 1"
        if self.fsdp != 1 and self.method == "lora" and self.lora.base_precision is not None:
            yield "lora.base_precision requires unsharded weights: set fsdp to 1"

    def _faults_of_control(self) -> Iterator[str]:
        """Settings that change the denoiser, which is frozen, or that it is not trained with."""
        if self.init == "random":
            yield "init: random requires method: full"
        changing = ("train_text_encoder", "inpainting", "aesthetic_score")
        for name in changing:
            if getattr(self, name):
                yield f"{name} requires method: full or lora: set false"
        if self.fsdp != 1:
            yield "method: controlnet requires unsharded weights: set fsdp to 1"

    def _faults_of_optimizer(self) -> Iterator[str]:
        """Settings that the optimizer, or its step within the backward pass, excludes."""
        is_schedule_free = self.optimizer == "adamw_schedule_free"
        if is_schedule_free and self.lr_scheduler != "constant":
            yield "optimizer: adamw_schedule_free requires lr_scheduler: constant"
        if is_schedule_free and self.ema_decay is not None:
            yield "optimizer: adamw_schedule_free has an average of its own: set ema_decay to null"
        if is_schedule_free and not self.adam_betas[0]:
            yield "optimizer: adamw_schedule_free requires an adam_betas[0] above 0"
        if self.optimizer == "prodigy" and self.text_encoder_lr is not None:
            yield "optimizer: prodigy has one learning rate: set text_encoder_lr to null"
        if not self.fused_backward:
            return
        if self.optimizer in ("prodigy", "adamw_schedule_free"):
            yield f"fused_backward: {self.optimizer} updates all weights at once: set false"
        if self.max_grad_norm is not None:
            yield "fused_backward requires max_grad_norm: null"
        if self.micro_batch(1) < self.global_batch_size:
            yield "fused_backward requires one micro-batch per step: set micro_batch_size to null"
        if self.world_size > 1 or self.fsdp != 1:
            yield "fused_backward requires processes: 1 and fsdp: 1"
        if self.cuda_graphs:
            yield "fused_backward requires cuda_graphs: false"

    def _faults_of_cuda_graphs(self) -> Iterator[str]:
        """Settings whose step has operations that CUDA cannot capture."""
        if not self.cuda_graphs:
            return
        if self.world_size > 1:
            yield "cuda_graphs requires processes: 1"
        if self.gradient_checkpointing != "none":
            yield "cuda_graphs requires gradient_checkpointing: none"
        if self.method == "lora" and self.lora.dropout:
            yield "cuda_graphs requires lora.dropout: 0"

    def _faults_of_streaming(self) -> Iterator[str]:
        """Settings with which no block can be streamed, or streaming saves nothing."""
        if not self.stream_blocks:
            return
        if self.stream_blocks != "auto" and self.stream_blocks < 3:
            yield "stream_blocks below 3 saves nothing, since two blocks are on the device: set 0"
        if self.method != "lora":
            yield "stream_blocks requires method: lora, whose blocks are frozen"
        if self.gradient_checkpointing != "blocks":
            yield "stream_blocks requires gradient_checkpointing: blocks"
        if self.compile == "denoiser":
            yield "stream_blocks requires compile: auto, none or blocks"
        if self.world_size > 1 or self.fsdp != 1:
            yield "stream_blocks requires processes: 1 and fsdp: 1"

    def _faults_of_checkpoint_scores(self) -> Iterator[str]:
        """Settings with which a checkpoint has no score for the rule that ranks it."""
        rule = self.best_checkpoint
        if rule is None and not self.keep_best:
            return
        setting_of_rule = "keep_best" if rule is None else "best_checkpoint"
        if self.ema_decay is not None and self.checkpointing_steps % self.ema_every_n_steps:
            yield (
                f"{setting_of_rule} compares averages that changed: ema_every_n_steps must divide "
                "checkpointing_steps"
            )
        name = "holdout_loss.every_n_steps"
        interval = self.holdout_loss.every_n_steps
        if rule is not None and rule.by_samples:
            name = "sample_every_n_steps"
            interval = self.sample_every_n_steps
        if self.checkpointing_steps % (interval or 2**63):
            yield (
                f"{setting_of_rule} requires a score per checkpoint: {name} must divide "
                "checkpointing_steps"
            )

    def with_steps(self, samples: int) -> Self:
        """The settings with `epochs` converted to `steps`, rounded up, for `samples` samples."""
        if self.epochs is None:
            return self
        epochs = fractions.Fraction(str(self.epochs))  # as floats, 1.1 * 100 > 110
        steps = max(1, math.ceil(epochs * samples / self.global_batch_size))
        return self.model_copy(update={"steps": steps, "epochs": None})

    @property
    def world_size(self) -> int:
        """Training processes of all hosts."""
        return self.hosts * self.processes

    @property
    def shard_group(self) -> int:
        """Processes that share the weights by FSDP, where each has a device; 1: none do."""
        if self.world_size == 1:
            return 1
        return self.world_size if self.fsdp == "all" else self.fsdp

    @property
    def hosts_of_group(self) -> int:
        """Hosts of a shard group; above 1, weights are gathered across hosts."""
        return -(-self.shard_group // self.processes)

    def micro_batch(self, ranks: int) -> int:
        """Samples of a micro-batch on each of `ranks` processes; the last may have fewer."""
        share = self.global_batch_size // ranks
        return min(self.micro_batch_size or share, share)

    @property
    def kept_best(self) -> int:
        """Number of best checkpoints that are kept beside the newest."""
        return max(self.keep_best, int(self.best_checkpoint is not None))

    @property
    def holdout_loss_inputs(self) -> dict[str, Any]:
        """The settings that a held-out loss depends on."""
        inputs: dict[str, Any] = {
            "noise_offset": self.noise_offset,
            "guidance_scale": self.guidance_scale,
        }
        if self.masked_loss is not None:
            inputs["masked_loss"] = self.masked_loss.model_dump()
        return inputs

    @property
    def streamed_blocks(self) -> int:
        """`stream_blocks`, once the plan has chosen a number."""
        assert self.stream_blocks != "auto"
        return self.stream_blocks

    @property
    def keeps_average(self) -> bool:
        """Whether an average of the weights is kept and published."""
        return self.ema_decay is not None or self.optimizer == "adamw_schedule_free"

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
