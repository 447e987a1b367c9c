"""Settings of a training run: the key, and invalid combinations."""

from typing import Any

import pytest
from pydantic import ValidationError

from configs.settings.recipe import with_defaults_without_effect
from configs.settings.train import Train


def key_settings(settings: Train) -> dict[str, Any]:
    """As of a run, which takes the default of a setting without effect."""
    return with_defaults_without_effect(settings).key_settings()


SCHEDULE_FREE = {"optimizer": "adamw_schedule_free"}
FUSED = {"fused_backward": True, "max_grad_norm": None}


STREAMED = {"stream_blocks": 3, "method": "lora", "gradient_checkpointing": "blocks"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"lora": {"rank": 4}}),
        ({}, {"lr_power": 2.0, "lr_num_cycles": 3, "lr_min_ratio": 0.1}),
        ({"processes": 2}, {"micro_batch_size": 4, "device": "cpu", "checkpointing_steps": 7}),
        ({"method": "lora"}, {"method": "lora", "processes": 2}),
        ({}, {"divergence": {"action": "skip", "patience": 2}}),  # of NaN alone
        ({}, {"huber": {"delta": 0.3}}),
        ({"divergence": {"factor": 3.0}}, {"divergence": {"action": "skip", "factor": 3.0}}),
    ],
)
def test_key_ignores_settings_without_effect(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert key_settings(Train(**one)) == key_settings(Train(**other))


@pytest.mark.parametrize(
    ("common", "change"),
    [
        ({}, {"learning_rate": 1.0}),
        ({}, {"loss": "huber"}),
        ({"loss": "huber"}, {"huber": {"delta": 0.3}}),
        ({"method": "lora"}, {"lora": {"rank": 4}}),
        ({"method": "lora"}, {"lora": {"base_precision": "int8"}}),
        ({"method": "lora", "lora": {"dropout": 0.1}}, {"processes": 2}),
        ({"method": "lora", "lora": {"dropout": 0.1}}, {"micro_batch_size": 2}),
        ({"lr_scheduler": "polynomial"}, {"lr_power": 2.0}),
        ({"train_text_encoder": True}, {"text_encoder_lr": 1e-6}),
        ({}, {"divergence": {"action": "skip", "factor": 3.0}}),
    ],
)
def test_key_has_settings_with_effect(common: dict[str, Any], change: dict[str, Any]) -> None:
    assert key_settings(Train(**common)) != key_settings(Train(**common, **change))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"processes": 3}, "processes"),
        ({"processes": 2, "fsdp": "all", "optimizer": "adafactor"}, "set fsdp to 1"),
        (
            {"hosts": 2, "processes": 3, "fsdp": 2, "global_batch_size": 6},
            "fsdp: groups of 2 begin within a host of 3 processes: set a divisor or a multiple",
        ),
        ({"keep_best": 1}, "keep_best"),
        ({"best_checkpoint": {}}, r"holdout_loss\.every_n_steps must divide checkpointing_steps"),
        (
            {"best_checkpoint": {"metric": "digit"}, "holdout_loss": {"every_n_steps": 500}},
            "best_checkpoint requires a score per checkpoint: sample_every_n_steps must divide",
        ),
        ({"best_checkpoint": {"min_delta": 0.1}}, "min_delta requires best_checkpoint.patience"),
        (
            {"keep_best": 1, "checkpointing_steps": 100, "holdout_loss": {"every_n_steps": 70}},
            "every_n_steps must divide",
        ),
        ({"snr_gamma": 5.0, "debiased_estimation_loss": True}, "set one"),
        ({"cuda_graphs": True, "processes": 2, "global_batch_size": 8}, "requires processes: 1"),
        (
            {"cuda_graphs": True, "gradient_checkpointing": "selective"},
            "requires gradient_checkpointing: none",
        ),
        (
            {"method": "lora", "lora": {"base_precision": "int8"}, "processes": 2, "fsdp": "all"},
            "base_precision requires unsharded weights: set fsdp to 1",
        ),
        ({"lora": {"base_precision": "int8", "dora": True}}, "int8 requires dora: false"),
        ({**STREAMED, "stream_blocks": 2}, "below 3 saves nothing"),
        ({**STREAMED, "stream_blocks": "auto", "method": "full"}, "requires method: lora"),
        ({**STREAMED, "method": "full"}, "requires method: lora"),
        ({**STREAMED, "gradient_checkpointing": "none"}, "gradient_checkpointing: blocks"),
        ({**STREAMED, "compile": "denoiser"}, "requires compile"),
        ({**STREAMED, "processes": 2}, "requires processes: 1"),
        (
            {"cuda_graphs": True, "method": "lora", "lora": {"dropout": 0.1}},
            "requires lora.dropout: 0",
        ),
        ({"attention": "cudnn"}, "attention: cudnn requires mixed_precision: bf16"),
        (
            {"attention": "cudnn", "mixed_precision": "bf16", "deterministic": True},
            "attention: cudnn requires deterministic: false",
        ),
        ({"method": "lora", "init": "random"}, "requires method: full"),
        ({"adam_betas": [0.9, 1.0]}, "less than 1"),
        ({"text_encoder_lr": 1e-5}, "train_text_encoder: true"),
        ({"steps": 10, "profile": {"start": 8, "steps": 3}}, "profile: steps 8 to 11"),
        ({"timesteps": {"bias_strategy": "later"}}, "no effect with bias_multiplier: 1"),
        ({"loss_scale": {"initial": 8.0}}, "loss_scale requires mixed_precision: fp16"),
        (SCHEDULE_FREE | {"lr_scheduler": "cosine"}, "requires lr_scheduler: constant"),
        (SCHEDULE_FREE | {"ema_decay": 0.9}, "an average of its own: set ema_decay to null"),
        (SCHEDULE_FREE | {"adam_betas": [0, 0.9]}, r"requires an adam_betas\[0\] above 0"),
        (
            {"optimizer": "prodigy", "train_text_encoder": True, "text_encoder_lr": 1.0},
            "prodigy has one learning rate",
        ),
        (FUSED | {"max_grad_norm": 1.0}, "fused_backward requires max_grad_norm: null"),
        (FUSED | {"micro_batch_size": 4}, "fused_backward requires one micro-batch per step"),
        (FUSED | {"processes": 2}, "fused_backward requires processes: 1"),
        (FUSED | {"cuda_graphs": True}, "fused_backward requires cuda_graphs: false"),
        (FUSED | {"optimizer": "prodigy"}, "fused_backward: prodigy updates all weights at once"),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Train(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adafactor"},
        {"timesteps": {"bias_strategy": "later", "bias_multiplier": 2.0}},
        {"cuda_graphs": True, "lora": {"dropout": 0.1}},  # full training has no adapters
    ],
)
def test_resolved_settings_are_valid(settings: dict[str, Any]) -> None:
    resolved = Train(**settings)
    assert Train(**resolved.model_dump(mode="json")) == resolved


#: Setting that affects the weights -> another value, and the settings that it requires.
IN_KEY: dict[str, tuple[Any, dict[str, Any]]] = {
    "method": ("lora", {}),
    "lora": ({"rank": 4}, {"method": "lora"}),
    "train_text_encoder": (True, {}),
    "text_encoder_lr": (1e-6, {"train_text_encoder": True}),
    "init": ("random", {}),
    "denoiser_config": ("config.json", {"init": "random"}),
    "inpainting": (True, {}),
    "aesthetic_score": (True, {}),
    "steps": (7, {}),
    "epochs": (2.0, {}),
    "seed": (1, {}),
    "guidance_scale": (3.5, {}),
    "global_batch_size": (8, {}),
    "optimizer": ("adafactor", {}),
    "learning_rate": (1e-4, {}),
    "lr_scheduler": ("linear", {}),
    "lr_min_ratio": (0.5, {"lr_scheduler": "linear"}),
    "lr_num_cycles": (2, {"lr_scheduler": "cosine_with_restarts"}),
    "lr_power": (2.0, {"lr_scheduler": "polynomial"}),
    "lr_warmup_steps": (3, {}),
    "weight_decay": (0.0, {}),
    "adam_betas": ([0.8, 0.99], {}),
    "adam_epsilon": (1e-6, {}),
    "max_grad_norm": (None, {}),
    "ema_decay": (0.9, {}),
    "ema_every_n_steps": (2, {"ema_decay": 0.9}),
    "allow_tf32": (True, {}),
    "prediction_type": ("v_prediction", {}),
    "zero_terminal_snr": (True, {}),
    "snr_gamma": (5.0, {}),
    "debiased_estimation_loss": (True, {}),
    "weighting_scheme": ("cosmap", {}),
    "noise_offset": (0.1, {}),
    "input_perturbation": (0.1, {}),
    "timesteps": ({"bias_strategy": "later", "bias_multiplier": 2.0}, {}),
    "caption_dropout_rate": (0.1, {}),
    "mixed_precision": ("bf16", {}),
    "loss_scale": ({"initial": 8.0}, {"mixed_precision": "fp16"}),
    "shuffle_window": (2, {}),
    "divergence": ({"factor": 3.0}, {}),
    "best_checkpoint": ({}, {"holdout_loss": {"every_n_steps": 500}}),
}


@pytest.mark.parametrize("name", IN_KEY)
def test_key_has_every_setting_of_the_weights(name: str) -> None:
    value, common = IN_KEY[name]
    assert key_settings(Train(**common)) != key_settings(Train(**common, **{name: value}))


def test_the_rule_for_the_best_checkpoint_adds_what_it_depends_on_to_the_key() -> None:
    def key(rule: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
        common = {"holdout_loss": {"every_n_steps": 50}, "sample_every_n_steps": 50}
        return key_settings(Train(**{**common, **settings}, best_checkpoint=rule))

    assert key(checkpointing_steps=100) == key()
    rule = key({})
    assert rule != key() and rule == key({"mode": "min"}) == key({}, checkpoints_total_limit=5)
    assert rule == key({}, holdout_loss={"every_n_steps": 25}), "other steps are no candidates"
    changed = [
        key({}, checkpointing_steps=100),
        key({}, holdout_loss={"every_n_steps": 50, "samples": 8}),
        key({}, holdout_loss={"every_n_steps": 50, "draws": 2}),
        key({"mode": "max"}),
        key({"patience": 2}),
        key({"patience": 2, "min_delta": 0.1}),
        key({"metric": "clip_score"}),
    ]
    assert all(found != rule for found in changed)
    drawn = {"metric": "clip_score"}
    assert key(drawn) == key(drawn, holdout_loss={}), "the held-out loss has no effect"


@pytest.mark.parametrize(("precision", "products"), [("no", "tf32"), ("bf16", "bfloat16")])
def test_tf32_multiplies_float32_alone(precision: Any, products: str) -> None:
    """`kiln plan` reads the settings as written, with those that have no effect."""
    assert Train(allow_tf32=True, mixed_precision=precision).product_dtype == products


def test_epochs_are_as_many_steps_as_written() -> None:
    """As floats, 1.1 times 100 is a little more than 110."""
    assert Train(epochs=1.1, global_batch_size=1).with_steps(100).steps == 110
    assert Train(epochs=1.1, global_batch_size=4).with_steps(200).steps == 55
    assert Train(epochs=1.2, global_batch_size=7).with_steps(100).steps == 18


def test_a_score_of_an_average_that_did_not_change_is_refused() -> None:
    given: dict[str, Any] = {"checkpointing_steps": 5, "ema_decay": 0.99, "keep_best": 1}
    given["holdout_loss"] = {"every_n_steps": 5}
    for every in (1, 5):
        Train(**given, ema_every_n_steps=every)
    with pytest.raises(ValueError, match="ema_every_n_steps must divide checkpointing_steps"):
        Train(**given, ema_every_n_steps=20)


def test_keys_of_squared_errors_lack_the_other_losses() -> None:
    assert {"loss", "huber"}.isdisjoint(key_settings(Train()))
