"""The settings of section `train` that the cache key of the weights contains."""

from __future__ import annotations

from typing import Any

from configs.settings.train import Train

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
