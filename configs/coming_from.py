"""Setting names of diffusers' scripts, kohya's sd-scripts and SimpleTuner, mapped to ours.

The error for such a name in a recipe contains our name. `python -m configs.coming_from` prints
docs/coming-from.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Foreign:
    """A setting of another tool, with our equivalent."""

    names: str  # one or more, separated by spaces
    tools: str  # letters of TOOLS
    ours: str  # dotted setting or section; "none" without an equivalent
    note: str = ""


TABLE = (
    Foreign("pretrained_model_name_or_path", "DKS", "model.path"),
    Foreign("revision", "DS", "model.revision"),
    Foreign("variant", "DS", "none", "a part without plain weights is read from its variant"),
    Foreign("pretrained_vae_model_name_or_path vae", "DKS", "model.vae"),
    Foreign("dataset_name", "D", "source.path", "with `source.kind: dataset`"),
    Foreign("train_data_dir in_json instance_data_dir", "DKS", "source.path", "`kind: folder`"),
    Foreign("dataset_config data_backend_config", "KS", "source", "one source per recipe"),
    Foreign("image_column", "D", "source.image_column"),
    Foreign("caption_column", "D", "source.caption_column"),
    Foreign("caption_extension", "K", "none", "the caption of `fox.png` is in `fox.txt`"),
    Foreign("output_dir logging_dir", "DKS", "store", "content-addressed artifacts"),
    Foreign("output_name", "KS", "publish.name"),
    Foreign("resolution", "DKS", "encode.resolution", "and `download.image_size`"),
    Foreign("center_crop crop_aspect", "DS", "encode.crop"),
    Foreign("random_flip flip_aug", "DKS", "encode.flip", "the store holds both variants"),
    Foreign("enable_bucket", "K", "encode.aspect_buckets"),
    Foreign("bucket_reso_steps aspect_bucket_rounding", "KS", "encode.bucket_step"),
    Foreign("max_bucket_reso min_bucket_reso", "K", "encode.max_aspect"),
    Foreign("vae_batch_size", "KS", "encode.batch_size"),
    Foreign("cache_latents cache_text_encoder_outputs", "K", "encode", "always precomputed"),
    Foreign("max_train_steps", "DKS", "train.steps"),
    Foreign("max_steps", "T", "train.steps"),
    Foreign(
        *("num_train_epochs max_train_epochs", "DKS", "train.epochs"),
        "instead of the `train.steps` of the extended recipe",
    ),
    Foreign("train_batch_size", "DKS", "train.micro_batch_size", "images per forward pass"),
    Foreign(
        "gradient_accumulation_steps",
        "DKS",
        "train.global_batch_size",
        "train_batch_size x gradient_accumulation_steps x processes",
    ),
    Foreign("num_processes", "DKS", "train.processes"),
    Foreign("use_fsdp fsdp_enable", "DS", "train.fsdp", "`all`, or devices per shard group"),
    Foreign("learning_rate unet_lr", "DKS", "train.learning_rate"),
    Foreign("lr", "P", "train.learning_rate"),
    Foreign("scale_lr", "D", "none", "learning_rate is not scaled"),
    Foreign("lr_scheduler", "DKS", "train.lr_scheduler",
            "`constant_with_warmup` is `constant` with `lr_warmup_steps`"),
    Foreign("lr_warmup_steps", "DKS", "train.lr_warmup_steps"),
    Foreign("lr_num_cycles lr_scheduler_num_cycles", "DKS", "train.lr_num_cycles"),
    Foreign("lr_power lr_scheduler_power", "DKS", "train.lr_power"),
    Foreign("lr_end lr_scheduler_min_lr_ratio", "KS", "train.lr_min_ratio", "fraction of the peak"),
    Foreign("optimizer_type", "K", "train.optimizer",
            "`adafactor` is theirs with `scale_parameter=False relative_step=False`"),
    Foreign("use_8bit_adam", "DK", "train.optimizer", "`adamw_8bit`"),
    Foreign("adam_beta1 adam_beta2", "DS", "train.adam_betas"),
    Foreign("adam_epsilon", "DS", "train.adam_epsilon"),
    Foreign("adam_weight_decay", "DS", "train.weight_decay"),
    Foreign("max_grad_norm", "DKS", "train.max_grad_norm"),
    Foreign("use_ema", "DS", "train.ema_decay", "null keeps no average"),
    Foreign("ema_update_interval", "S", "train.ema_every_n_steps"),
    Foreign("allow_tf32", "D", "train.allow_tf32"),
    Foreign("mixed_precision", "DKS", "train.mixed_precision"),
    Foreign(
        *("full_bf16 full_fp16", "K", "train.mixed_precision"),
        "trained weights stay float32; a LoRA's frozen base has this precision",
    ),
    Foreign("fp8_base fp8_scaled base_model_precision", "KS", "train.lora.base_precision",
            "`int8`, such as for `fp8_base` or `int8-quanto`"),
    Foreign("enable_model_cpu_offload", "D", "evaluate.offload", "layer by layer"),
    Foreign("save_precision", "K", "publish.dtype"),
    Foreign("gradient_checkpointing", "DKS", "train.gradient_checkpointing", "`blocks`"),
    Foreign("snr_gamma min_snr_gamma", "DKS", "train.snr_gamma"),
    Foreign("debiased_estimation_loss", "K", "train.debiased_estimation_loss",
            "of v-prediction sqrt(SNR) / (SNR + 1); kohya's is 1 / (SNR + 1)"),
    Foreign("noise_offset", "DKS", "train.noise_offset"),
    Foreign("input_perturbation ip_noise_gamma", "DKS", "train.input_perturbation"),
    Foreign("prediction_type", "DS", "train.prediction_type"),
    Foreign("v_parameterization", "K", "train.prediction_type", "`v_prediction`"),
    Foreign(
        "rescale_betas_zero_snr zero_terminal_snr", "DKS", "train.zero_terminal_snr"
    ),
    Foreign("weighting_scheme", "DK", "train.weighting_scheme", "sampling: train.timesteps"),
    Foreign("logit_mean", "DK", "train.timesteps.logit_mean", "with the same sign"),
    Foreign("logit_std", "DK", "train.timesteps.logit_std"),
    Foreign("timestep_sampling flow_schedule_auto_shift", "KS",
            "train.timesteps.resolution_shift",
            "true for `flux_shift` or auto, which also need `distribution: logit_normal`"),
    Foreign("guidance_scale flux_guidance_value", "DKS", "train.guidance_scale",
            "of the denoiser's guidance input, as of FLUX.1 dev"),
    Foreign("timestep_bias_strategy", "DS", "train.timesteps.bias_strategy"),
    Foreign("timestep_bias_multiplier", "DS", "train.timesteps.bias_multiplier"),
    Foreign("timestep_bias_portion", "DS", "train.timesteps.bias_portion"),
    Foreign("timestep_bias_begin min_timestep", "DKS", "train.timesteps.bias_begin",
            "a weight by `bias_multiplier`; kohya excludes the others"),
    Foreign("timestep_bias_end max_timestep", "DKS", "train.timesteps.bias_end",
            "a weight by `bias_multiplier`; kohya excludes the others"),
    Foreign(
        "proportion_empty_prompts caption_dropout_rate caption_dropout_probability",
        "DKS",
        "train.caption_dropout_rate",
    ),
    Foreign("train_text_encoder", "DKS", "train.train_text_encoder"),
    Foreign("text_encoder_lr learning_rate_te1 learning_rate_te2", "DK", "train.text_encoder_lr"),
    Foreign("rank network_dim lora_rank", "DKS", "train.lora.rank"),
    Foreign("network_alpha lora_alpha", "DKS", "train.lora.alpha",
            "null here is the rank; kohya's default is 1"),
    Foreign("network_dropout lora_dropout", "DKS", "train.lora.dropout"),
    Foreign("target_modules lora_layers flux_lora_target", "DS", "train.lora.target_modules"),
    Foreign("network_module lora_type model_type", "KS", "train.method", "`full` or `lora`"),
    Foreign("checkpointing_steps save_every_n_steps checkpoint_step_interval", "DKS",
            "train.checkpointing_steps"),
    Foreign("checkpoints_total_limit", "DS", "train.checkpoints_total_limit"),
    Foreign("load_best_model_at_end metric_for_best_model", "T", "train.best_checkpoint",
            "`metric`; `{}` is the lowest held-out loss"),
    Foreign("greater_is_better", "T", "train.best_checkpoint.mode", "`min` or `max`"),
    Foreign("early_stopping_patience", "T", "train.best_checkpoint.patience"),
    Foreign("early_stopping_threshold", "T", "train.best_checkpoint.min_delta"),
    Foreign("resume_from_checkpoint resume", "DKS", "none", "runs resume automatically"),
    Foreign("validation_steps validation_epochs sample_every_n_steps sample_every_n_epochs",
            "DKS", "train.sample_every_n_steps"),
    Foreign("validation_prompt validation_prompts sample_prompts", "DKS", "evaluate.prompts"),
    Foreign("validation_guidance validation_num_inference_steps", "S", "evaluate",
            "guidance_scale, num_inference_steps"),
    Foreign("eval_steps_interval", "S", "train.holdout_loss.every_n_steps"),
    Foreign("report_to log_with", "DKS", "train.wandb", "TensorBoard files are always written"),
    Foreign("seed", "DKS", "train.seed"),
    Foreign("dataloader_num_workers max_data_loader_n_workers", "DKS", "train.prefetch"),
    Foreign("push_to_hub hub_model_id", "DS", "publish.hub",
            "`{repo: owner/name}`, if the gate passes"),
    Foreign("enable_xformers_memory_efficient_attention xformers sdpa attention_mechanism",
            "DKS", "train.attention", "PyTorch's kernels alone"),
    Foreign("validation_split", "K", "encode.holdout", "a fraction of the pictures"),
    Foreign("shuffle_caption keep_tokens caption_tag_dropout_rate token_warmup_step", "K", "none",
            "captions are encoded once; a picture may have several, one of which a step takes"),
    Foreign("num_repeats repeats dataset_repeats", "KS", "none",
            "an epoch has each picture once"),
    Foreign("class_data_dir with_prior_preservation prior_loss_weight reg_data_dir", "DK", "none",
            "put pictures of the class into the source, with captions of their own"),
    Foreign("blocks_to_swap", "K", "none",
            "`train.lora.base_precision: int8` and `gradient_checkpointing` save memory"),
    Foreign("network_weights init_lora", "KS", "none",
            "publish adapters with `publish.merge`, and take that folder as `model.path`"),
    Foreign("loss_type huber_c huber_schedule", "DKS", "none", "the loss is the squared error"),
    Foreign("multires_noise_iterations multires_noise_discount", "K", "none",
            "`train.noise_offset` is there"),
    Foreign("max_token_length", "K", "none", "captions have the length that the encoder reads"),
)  # fmt: skip
TOOLS = {"D": "diffusers", "K": "kohya", "P": "PyTorch", "S": "SimpleTuner", "T": "transformers"}

#: Setting and value of another tool -> our equivalent.
VALUES = {
    ("train.lr_scheduler", "constant_with_warmup"): "constant here, with train.lr_warmup_steps",
    ("train.lr_scheduler", "cosine_with_min_lr"): "cosine here, with train.lr_min_ratio",
    ("evaluate.scheduler", "euler_a"): "euler_ancestral here",
    ("train.optimizer", "AdamW8bit"): "adamw_8bit here",
    ("train.optimizer", "AdamW"): "adamw here",
    ("train.optimizer", "Adafactor"): "adafactor here",
}


def ours(name: str) -> Foreign | None:
    """The row of another tool's setting; None if no tool has it."""
    return next((foreign for foreign in TABLE if name in foreign.names.split()), None)


def value_hint(setting: str, value: Any) -> str:
    """Our equivalent of another tool's value; empty without one."""
    return VALUES.get((setting, value), "") if isinstance(value, str) else ""


def hint(foreign: Foreign) -> str:
    """A hint for an error: our name of the setting."""
    if foreign.ours == "none":
        return f"no equivalent here: {foreign.note}"
    return f"called {foreign.ours} here" + (f": {foreign.note}" if foreign.note else "")


def page() -> str:
    """The text of docs/coming-from.md."""
    lines = [
        "# Coming from diffusers, kohya or SimpleTuner",
        "",
        "Settings of these tools and their names in Kilnworks. The error for one of them in a",
        "recipe contains our name. `python -m configs.coming_from` prints this page.",
        "",
        "| their setting | tool | our setting | note |",
        "|---|---|---|---|",
    ]
    for foreign in TABLE:
        theirs = ", ".join(f"`{name}`" for name in foreign.names.split())
        tools = ", ".join(TOOLS[tool] for tool in foreign.tools)
        here = "none" if foreign.ours == "none" else f"`{foreign.ours}`"
        lines.append(f"| {theirs} | {tools} | {here} | {foreign.note} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
