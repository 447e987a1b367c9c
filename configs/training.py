"""Every setting of the section `train`: what is trained, towards what, how, and how it is watched.

`computing` gives those that the weights depend on, and leaves out how a run is carried out.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from configs.section import Fraction, Section

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class Lora(Section):
    """Low-rank adapters beside frozen weights (arXiv 2106.09685)."""

    rank: PositiveInt = Field(16, description="Rank of the adapters.")
    alpha: float | None = Field(
        None, gt=0, description="Adapters are scaled by alpha / rank; null takes alpha = rank."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the adapters' input.")
    target_modules: Literal["attention", "linear", "all"] | tuple[str, ...] = Field(
        "attention",
        description="Layers of the denoiser with an adapter: attention projections, all linear "
        "layers, all linear and convolution layers (LoCon), or the ends of layer names.",
    )
    dora: bool = Field(
        False, description="Train magnitude and direction apart (DoRA, arXiv 2402.09353)."
    )


class TimestepSampling(Section):
    """How timesteps are drawn."""

    distribution: Literal["uniform", "logit_normal"] = Field(
        "uniform", description="Of u in (0, 1); logit_normal is SD3's (arXiv 2403.03206)."
    )
    logit_mean: float = Field(
        0.0,
        description="Mean of the logit-normal's normal; as in diffusers, above 0 draws less noise "
        "(the paper's mean has the other sign).",
    )
    logit_std: float = Field(
        1.0, gt=0, description="Standard deviation of the logit-normal's normal."
    )
    bias_strategy: Literal["none", "earlier", "later", "range"] = Field(
        "none",
        description="Timesteps drawn more often (or less): the least noisy, the noisiest, or those "
        "from `bias_begin` to `bias_end`.",
    )
    bias_multiplier: float = Field(1.0, gt=0, description="How many times more often.")
    bias_portion: Fraction = Field(
        0.25, description="Share of all timesteps, for earlier and later."
    )
    bias_begin: int = Field(0, ge=0, description="First timestep of the range.")
    bias_end: PositiveInt = Field(1000, description="Timestep after the last of the range.")

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
    """The loss on held-out samples with fixed noise, measured while training."""

    every_n_steps: int = Field(0, ge=0, description="Steps between; 0 is never.")
    samples: PositiveInt = Field(64, description="Most held-out samples it is taken on.")
    draws: PositiveInt = Field(1, description="Noise draws per sample.")


class OnDivergence(Section):
    """What to do at a loss that is no number, or far above what it was."""

    action: Literal["stop", "skip"] = Field(
        "stop",
        description="stop ends the run with a clear word; skip goes back to the newest checkpoint "
        "and leaves the batch out.",
    )
    factor: float | None = Field(
        None, gt=1, description="Times the recent mean loss that count as diverged; null: only NaN."
    )
    patience: PositiveInt = Field(1, description="Steps in a row above it before it counts.")
    max_skips: PositiveInt = Field(5, description="Batches skipped before the run is stopped.")


class Profile(Section):
    """A trace of some steps, for TensorBoard or chrome://tracing."""

    start: int = Field(10, ge=0, description="First step traced.")
    steps: int = Field(0, ge=0, description="How many; 0 is none.")


class LossScale(Section):
    """Dynamic loss scaling for float16 (arXiv 1710.03740): halved at an overflow, whose step is
    skipped, doubled after so many steps without one."""

    initial: float = Field(65536.0, ge=1, description="Where it starts.")
    growth_every: PositiveInt = Field(2000, description="Steps without overflow that double it.")


class MindSpore(Section):
    """What runtime mindspore alone has."""

    mode: Literal["pynative", "graph"] = Field(
        "pynative", description="Forward and backward operator by operator, or as compiled graph."
    )
    jit_level: Literal["O0", "O1", "O2"] = Field(
        "O0",
        description="Of the graph: as it is, with operators fused, or by CANN's graph engine "
        "(Ascend alone).",
    )
    flash_attention: bool = Field(
        True, description="Ascend's fused attention, for mixed_precision fp16 and bf16."
    )
    data_sink: bool = Field(
        True, description="Put batches into an NPU's memory while it computes those before."
    )

    @model_validator(mode="after")
    def _mode_has_it(self) -> MindSpore:
        if self.mode == "pynative":
            self.refuse_changed(("jit_level",), "mode: pynative")
        return self


class Hpu(Section):
    """What device hpu (Intel Gaudi) of runtime torch alone has."""

    mode: Literal["eager", "lazy"] | None = Field(
        None,
        description="Operators one by one (and torch.compile, see `compile`), or collected into "
        "graphs up to each mark_step; null takes PT_HPU_LAZY_MODE's word, else eager.",
    )
    graphs: bool = Field(
        False, description="In mode lazy, record forward and backward as HPU graphs, and replay."
    )
    max_graphs: PositiveInt = Field(10, description="Most HPU graphs kept: one a shape of batches.")
    fused: bool = Field(
        True, description="Habana's FusedAdamW and FusedClipNorm, where they are installed."
    )
    recipe_cache_megabytes: PositiveInt = Field(
        1024, description="Most megabytes of compiled graphs kept in the store."
    )
    gpu_migration: bool = Field(
        False, description="Load Habana's GPU migration toolkit, for code that names cuda."
    )

    @model_validator(mode="after")
    def _graphs_are_lazy(self) -> Hpu:
        if self.graphs and self.mode == "eager":
            raise ValueError("graphs is for mode: lazy")
        return self


class Wandb(Section):
    """Weights & Biases; its key is taken from WANDB_API_KEY."""

    project: str = Field(description="Project that runs are filed in.")
    entity: str | None = Field(None, description="User or team; null is the default one.")
    mode: Literal["online", "offline"] = Field("online", description="offline writes files only.")


class Train(Section):
    """The training run."""

    method: Literal["full", "lora"] = Field(
        "full", description="Train all weights of the denoiser, or adapters beside them."
    )
    lora: Lora = Lora()
    train_text_encoder: bool = Field(
        False,
        description="Train the CLIP text encoders too, by the same method; captions are then "
        "encoded in the step.",
    )
    text_encoder_lr: float | None = Field(
        None, gt=0, description="Their peak learning rate; null is the denoiser's."
    )
    init: Literal["base", "random"] = Field(
        "base", description="Start from the base's weights, or from scratch."
    )
    denoiser_config: str | None = Field(
        None,
        description="With `init: random`: a config.json of another denoiser of the base's class.",
    )
    inpainting: bool = Field(
        False,
        description="Train a UNet that also sees a mask and what it leaves of the picture (nine "
        "channels in place of four); a base without them gains them, at first without effect.",
    )
    aesthetic_score: bool = Field(
        False,
        description="Condition a UNet on each picture's aesthetic score, as a class label; a base "
        "that takes none gains the layers, at first without effect.",
    )
    steps: PositiveInt = Field(1000, description="Optimizer steps.")
    epochs: float | None = Field(
        None, gt=0, description="Passes over the training samples, in place of `steps`."
    )
    seed: int = Field(
        0, ge=0, lt=2**63, description="Seed of order, noise, timesteps, dropout and fresh weights."
    )
    global_batch_size: PositiveInt = Field(16, description="Samples a step, over all devices.")
    micro_batch_size: PositiveInt | None = Field(
        None,
        description="Samples a forward pass; less than a device's share accumulates gradients.",
    )

    optimizer: Literal["adamw", "adamw_8bit", "adafactor"] = Field(
        "adamw",
        description="AdamW (arXiv 1711.05101), with 8-bit moments (arXiv 2110.02861), or Adafactor "
        "(arXiv 1804.04235).",
    )
    learning_rate: float = Field(
        1e-5, gt=0, description="Peak learning rate; Adafactor's is relative to a weight's size."
    )
    lr_scheduler: Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial"] = (
        Field(
            "constant", description="Shape after warm-up; all but constant end at `lr_min_ratio`."
        )
    )
    lr_min_ratio: Fraction = Field(
        0.0, description="Learning rate at the end, as a share of the peak."
    )
    lr_num_cycles: PositiveInt = Field(1, description="Falls of cosine_with_restarts.")
    lr_power: float = Field(1.0, gt=0, description="Exponent of polynomial.")
    lr_warmup_steps: int = Field(0, ge=0, description="Steps of linear rise from 0.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay.")
    adam_betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="AdamW's beta1 and beta2.")
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    max_grad_norm: float | None = Field(
        1.0, gt=0, description="Clip the gradient's L2 norm to this."
    )
    ema_decay: float | None = Field(
        None, ge=0, lt=1, description="Decay of the weight average that is published; null is none."
    )

    prediction_type: Literal["epsilon", "v_prediction", "sample", "flow"] | None = Field(
        None, description="What the denoiser predicts; null takes the base's scheduler's word."
    )
    zero_terminal_snr: bool | None = Field(
        None,
        description="Rescale the noise schedule so that it ends in pure noise (arXiv 2305.08891); "
        "null takes the base's scheduler's word.",
    )
    snr_gamma: float | None = Field(
        None,
        gt=0,
        description="Min-SNR weighting with this gamma (5.0 in the paper); null is none.",
    )
    debiased_estimation_loss: bool = Field(
        False, description="Weight by 1 / sqrt(SNR) (arXiv 2310.08442); not with snr_gamma."
    )
    weighting_scheme: Literal["none", "sigma_sqrt", "cosmap"] = Field(
        "none", description="Loss weights of flow matching (arXiv 2403.03206)."
    )
    noise_offset: float = Field(0.0, ge=0, description="Scale of a per-channel shift of the noise.")
    input_perturbation: float = Field(
        0.0, ge=0, description="Scale of noise on the noise given to the model (arXiv 2301.11706)."
    )
    timesteps: TimestepSampling = TimestepSampling()
    caption_dropout_rate: Fraction = Field(
        0.0, description="Share of samples trained without a caption."
    )

    mixed_precision: Literal["no", "bf16", "fp16"] = Field(
        "no",
        description="Precision of forward and backward; trained weights stay float32. fp16 is for "
        "runtime mindspore.",
    )
    loss_scale: LossScale = LossScale()
    gradient_checkpointing: bool = Field(False, description="Trade compute for activation memory.")
    compile: bool = Field(False, description="torch.compile the denoiser.")
    device: str = Field(
        "auto", description="auto, cpu, cuda[:N], npu[:N], hpu[:N], tpu or ascend[:N]."
    )
    processes: PositiveInt = Field(1, description="Processes of this machine; a GPU or NPU each.")
    mindspore: MindSpore = MindSpore()
    hpu: Hpu = Hpu()
    fsdp: PositiveInt | Literal["all"] = Field(
        1,
        description="Devices that share each array (FSDP): 1 keeps all whole on each; `all`, or as "
        "many as there are processes, for runtime torch; a divisor of the devices for jax and xla.",
    )

    shuffle_window: PositiveInt = Field(4, description="Shards whose samples are mixed at a time.")
    prefetch: PositiveInt = Field(2, description="Batches made ready ahead of the device.")
    cache_bytes: PositiveInt = Field(
        20 * 2**30, description="Local bytes kept of a remote store's shards."
    )

    checkpointing_steps: PositiveInt = Field(500, description="Steps between checkpoints.")
    checkpoints_total_limit: PositiveInt = Field(2, description="Newest checkpoints kept.")
    keep_best: int = Field(
        0, ge=0, description="Checkpoints of the lowest held-out loss kept beside the newest."
    )
    checkpoint_shard_bytes: PositiveInt = Field(
        5 * 10**9, description="Largest file of a checkpoint; what is larger is split."
    )
    grace_seconds: float = Field(60.0, gt=0, description="Seconds to checkpoint in when cancelled.")

    logging_steps: PositiveInt = Field(10, description="Steps between metric lines.")
    sample_every_n_steps: int = Field(
        0, ge=0, description="Steps between sample pictures; 0 is none."
    )
    holdout_loss: HoldoutLoss = HoldoutLoss()
    divergence: OnDivergence = OnDivergence()
    profile: Profile = Profile()
    peak_tflops: float | None = Field(
        None, gt=0, description="Peak of one chip for MFU, in TFLOP/s; null takes the known one."
    )
    wandb: Wandb | None = Field(None, description="Weights & Biases; null is none.")

    @model_validator(mode="after")
    def _goes_together(self) -> Train:
        if self.snr_gamma is not None and self.debiased_estimation_loss:
            raise ValueError("snr_gamma and debiased_estimation_loss are two weightings: give one")
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
                f"are not all among the {self.steps} of the run"
            )
        if self.keep_best and self.checkpointing_steps % (self.holdout_loss.every_n_steps or 2**63):
            raise ValueError(
                "keep_best needs a held-out loss at every checkpoint: holdout_loss.every_n_steps "
                "must divide checkpointing_steps"
            )
        if self.global_batch_size % self.processes:
            raise ValueError(
                f"processes: {self.processes} do not share a global_batch_size of "
                f"{self.global_batch_size}: make it a multiple"
            )
        if self.fsdp != 1 and self.optimizer != "adamw":
            raise ValueError(f"optimizer {self.optimizer} needs whole arrays: fsdp must be 1")
        if self.optimizer == "adafactor":
            self.refuse_changed(("adam_betas", "adam_epsilon"), "optimizer: adafactor")
        return self

    def with_steps(self, samples: int) -> Train:
        """The same with `epochs` as steps, for so many training samples; the last step is whole."""
        if self.epochs is None:
            return self
        steps = max(1, math.ceil(self.epochs * samples / self.global_batch_size))
        return self.model_copy(update={"steps": steps, "epochs": None})

    @property
    def compute_dtype(self) -> str:
        """The dtype of forward and backward, by its name in PyTorch, JAX and MindSpore."""
        return {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}[self.mixed_precision]


#: How a run is carried out rather than what it computes: these may change at a resume.
CARRYING_OUT = frozenset(
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


def computing(settings: Train) -> dict[str, Any]:
    """The settings that the trained weights depend on: those without effect are left out."""
    left_out = set(CARRYING_OUT)
    if settings.method == "full":
        left_out.add("lora")
    elif settings.lora.dropout:  # drawn anew for each forward pass of each process
        left_out -= {"micro_batch_size", "processes"}
    if settings.compute_dtype != "float16":
        left_out.add("loss_scale")
    if settings.lr_scheduler == "constant":
        left_out.add("lr_min_ratio")
    if settings.lr_scheduler != "cosine_with_restarts":
        left_out.add("lr_num_cycles")
    if settings.lr_scheduler != "polynomial":
        left_out.add("lr_power")
    return settings.model_dump(mode="json", exclude=left_out)
