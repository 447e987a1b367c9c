"""Which settings of a training run count, and which do not go together."""

from typing import Any

import pytest
from pydantic import ValidationError

from configs.training import CARRYING_OUT, Train, computing


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"lora": {"rank": 4}}),
        ({}, {"lr_power": 2.0, "lr_cycles": 3, "lr_final": 0.1}),
        ({"processes": 2}, {"micro_batch_size": 4, "device": "cpu", "checkpoint_every": 7}),
        ({"method": "lora"}, {"method": "lora", "processes": 2}),
    ],
)
def test_what_has_no_effect_does_not_count(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert computing(Train(**one)) == computing(Train(**other))


@pytest.mark.parametrize(
    ("common", "change"),
    [
        ({}, {"learning_rate": 1.0}),
        ({}, {"divergence": {"action": "skip"}}),
        ({"method": "lora"}, {"lora": {"rank": 4}}),
        ({"method": "lora", "lora": {"dropout": 0.1}}, {"processes": 2}),
        ({"method": "lora", "lora": {"dropout": 0.1}}, {"micro_batch_size": 2}),
        ({"lr_schedule": "polynomial"}, {"lr_power": 2.0}),
        ({"text_encoders": True}, {"text_encoder_learning_rate": 1e-6}),
    ],
)
def test_what_has_an_effect_counts(common: dict[str, Any], change: dict[str, Any]) -> None:
    assert computing(Train(**common)) != computing(Train(**common, **change))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"processes": 3}, "processes"),
        ({"processes": 2, "parallel": "fsdp", "optimizer": "adafactor"}, "parallel must be data"),
        ({"keep_best": 1}, "keep_best"),
        ({"keep_best": 1, "checkpoint_every": 100, "validation": {"every": 70}}, "must divide"),
        ({"snr_gamma": 5.0, "debiased": True}, "give one"),
        ({"method": "lora", "init": "random"}, "method must be full"),
        ({"betas": [0.9, 1.0]}, "less than 1"),
        ({"text_encoder_learning_rate": 1e-5}, "text_encoders: true"),
        ({"steps": 10, "profile": {"start": 8, "steps": 3}}, "profile: steps 8 to 11"),
        (
            {"optimizer": "adafactor", "betas": [0.9, 0.99]},
            r"betas has no effect with optimizer: adafactor: leave it at \[0.9, 0.999\]",
        ),
        ({"timesteps": {"begin": 200}}, "begin has no effect with bias: none: leave it at 0"),
        ({"timesteps": {"bias": "later", "end": 500}}, "end has no effect with bias: later"),
        ({"timesteps": {"bias": "range", "portion": 0.5}}, "portion has no effect with bias"),
        ({"loss_scale": {"initial": 8.0}}, "loss_scale is for compute_dtype: float16"),
        ({"mindspore": {"jit_level": "O1"}}, "jit_level has no effect with mode: pynative"),
    ],
)
def test_what_does_not_go_together_is_said(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Train(**settings)


@pytest.mark.parametrize("settings", [{"optimizer": "adafactor"}, {"timesteps": {"bias": "later"}}])
def test_resolved_settings_name_also_what_has_no_effect(settings: dict[str, Any]) -> None:
    resolved = Train(**settings)
    assert Train(**resolved.model_dump(mode="json")) == resolved


#: Every setting that the trained weights depend on, as it is not by default, and what it needs.
COUNTING: dict[str, tuple[Any, dict[str, Any]]] = {
    "method": ("lora", {}),
    "lora": ({"rank": 4}, {"method": "lora"}),
    "text_encoders": (True, {}),
    "text_encoder_learning_rate": (1e-6, {"text_encoders": True}),
    "init": ("random", {}),
    "denoiser_config": ("config.json", {"init": "random"}),
    "inpainting": (True, {}),
    "aesthetic_score": (True, {}),
    "steps": (7, {}),
    "seed": (1, {}),
    "global_batch_size": (8, {}),
    "optimizer": ("adafactor", {}),
    "learning_rate": (1e-4, {}),
    "lr_schedule": ("linear", {}),
    "lr_final": (0.5, {"lr_schedule": "linear"}),
    "lr_cycles": (2, {"lr_schedule": "cosine_with_restarts"}),
    "lr_power": (2.0, {"lr_schedule": "polynomial"}),
    "warmup_steps": (3, {}),
    "weight_decay": (0.0, {}),
    "betas": ([0.8, 0.99], {}),
    "epsilon": (1e-6, {}),
    "max_grad_norm": (None, {}),
    "ema_decay": (0.9, {}),
    "prediction_type": ("v_prediction", {}),
    "zero_terminal_snr": (True, {}),
    "snr_gamma": (5.0, {}),
    "debiased": (True, {}),
    "flow_weighting": ("cosmap", {}),
    "noise_offset": (0.1, {}),
    "input_perturbation": (0.1, {}),
    "timesteps": ({"bias": "later"}, {}),
    "caption_dropout": (0.1, {}),
    "compute_dtype": ("bfloat16", {}),
    "loss_scale": ({"initial": 8.0}, {"compute_dtype": "float16"}),
    "shuffle_window": (2, {}),
    "divergence": ({"action": "skip"}, {}),
}


@pytest.mark.parametrize("name", COUNTING)
def test_every_setting_of_the_weights_counts(name: str) -> None:
    value, common = COUNTING[name]
    assert computing(Train(**common)) != computing(Train(**common, **{name: value}))


def test_of_every_setting_it_is_known_whether_it_counts() -> None:
    assert set(Train.model_fields) == COUNTING.keys() | CARRYING_OUT
