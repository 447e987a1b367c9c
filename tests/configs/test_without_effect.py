"""Settings that another one disables are told, and change no key."""

from pathlib import Path
from typing import Any

import pytest
from shortest_recipe import shortest_recipe

from configs.load_recipe import load_recipe, recipe_names
from configs.settings.recipe import Recipe, warnings_without_effect, with_defaults_without_effect
from tasks.encode import crop_to_bucket as encode
from tasks.evaluate import stage as evaluate
from tasks.publish import stage as publish

SQUARES = {"encode.aspect_buckets": False}
CENTRE = {"encode.crop": "center"}
FULL = {"train.method": "full"}
ADAFACTOR = {"train.optimizer": "adafactor"}
TIMESTEPS = "train.timesteps"
LATER = {f"{TIMESTEPS}.bias_strategy": "later", f"{TIMESTEPS}.bias_multiplier": 2.0}
RANGE = LATER | {f"{TIMESTEPS}.bias_strategy": "range"}
BASE = {"retrain.start": "base"}


@pytest.mark.parametrize(
    ("choice", "setting", "value", "enabled"),
    [
        (SQUARES, "encode.max_aspect", 3.0, {"encode.aspect_buckets": True}),
        (SQUARES, "encode.bucket_step", 32, {"encode.aspect_buckets": True}),
        (CENTRE, "encode.seed", 1, {"encode.crop": "random"}),
        (CENTRE, "encode.seed", 1, {"encode.masks": 2, "train.inpainting": True}),
        (FULL, "train.lora.rank", 4, {"train.method": "lora"}),
        (FULL, "publish.merge", True, {"train.method": "lora"}),
        (
            {"train.lr_scheduler": "constant"},
            *("train.lr_min_ratio", 0.5, {"train.lr_scheduler": "linear"}),
        ),
        ({}, "train.lr_num_cycles", 2, {"train.lr_scheduler": "cosine_with_restarts"}),
        ({}, "train.lr_power", 2.0, {"train.lr_scheduler": "polynomial"}),
        (ADAFACTOR, "train.adam_betas", (0.5, 0.6), {"train.optimizer": "adamw"}),
        (ADAFACTOR, "train.adam_epsilon", 1e-6, {"train.optimizer": "adamw"}),
        ({"train.ema_decay": None}, "train.ema_every_n_steps", 2, {"train.ema_decay": 0.9}),
        (
            {"train.mixed_precision": "bf16"},
            "train.allow_tf32",
            True,
            {"train.mixed_precision": "no"},
        ),
        ({}, f"{TIMESTEPS}.logit_mean", 1.0, {f"{TIMESTEPS}.distribution": "logit_normal"}),
        ({}, f"{TIMESTEPS}.logit_std", 2.0, {f"{TIMESTEPS}.distribution": "logit_normal"}),
        (RANGE, f"{TIMESTEPS}.bias_portion", 0.5, LATER),
        (LATER, f"{TIMESTEPS}.bias_begin", 5, RANGE),
        (LATER, f"{TIMESTEPS}.bias_end", 500, RANGE),
        (
            {"runtime": "mindspore"},
            *("train.mindspore.jit_level", "O1", {"train.mindspore.mode": "graph"}),
        ),
        ({}, "train.holdout_loss.samples", 8, {"train.holdout_loss.every_n_steps": 1}),
        ({}, "train.holdout_loss.draws", 2, {"train.holdout_loss.every_n_steps": 1}),
        ({}, "train.divergence.patience", 2, {"train.divergence.factor": 3.0}),
        ({}, "train.divergence.max_skips", 2, {"train.divergence.action": "skip"}),
        ({}, "train.profile.start", 2, {"train.profile.steps": 1}),
        (BASE, "retrain.epochs", 2.0, {"retrain.start": "champion"}),
        (BASE, "retrain.max_steps", 2, {"retrain.start": "champion"}),
        (BASE, "retrain.replay", 0.1, {"retrain.start": "champion"}),
        (BASE, "retrain.learning_rate", 1e-6, {"retrain.start": "champion"}),
    ],
)
def test_a_setting_without_effect_becomes_its_default(
    choice: dict[str, Any], setting: str, value: Any, enabled: dict[str, Any]
) -> None:
    plain = with_defaults_without_effect(load_recipe("digits", choice))
    given = load_recipe("digits", {**choice, setting: value})
    told = [name for name, _ in given.without_effect()]
    assert [name for name in told if setting.startswith(name)]
    assert with_defaults_without_effect(given) == plain
    used = load_recipe("digits", {**choice, setting: value, **enabled})
    assert not any(setting.startswith(name) for name, _ in used.without_effect())
    assert with_defaults_without_effect(used) != with_defaults_without_effect(
        load_recipe("digits", {**choice, **enabled})
    )


def test_what_disables_a_setting_is_told() -> None:
    unused = {"train.divergence.patience": 2, f"{TIMESTEPS}.bias_multiplier": 2.0}
    recipe = load_recipe("digits", {"encode.seed": 1, **unused})
    assert dict(recipe.without_effect()) == {
        "encode.seed": "encode.crop: center and encode.masks: 0",
        "train.divergence.patience": "train.divergence.factor: null",
        f"{TIMESTEPS}.bias_multiplier": f"{TIMESTEPS}.bias_strategy: none",
    }


def test_a_learning_rate_of_adamw_is_told_to_be_no_rate_of_prodigy() -> None:
    given = {"train.optimizer": "prodigy", "train.learning_rate": 1e-4}
    (words,) = warnings_without_effect(load_recipe("digits", given))
    assert words == "train.learning_rate: 0.0001 is a factor with optimizer: prodigy: set 1"
    assert not warnings_without_effect(load_recipe("digits", given | {"train.learning_rate": 1.0}))


EDITED = {"prompts": [{"prompt": "a seven", "references": ["a.png"]}]}


@pytest.mark.parametrize("more", [{}, {"unseen": {"held_out": 4}}])
def test_samples_without_a_prompt_to_draw_are_told(more: dict[str, Any]) -> None:
    def told(**sets: Any) -> list[str]:
        recipe = shortest_recipe(train={"sample_every_n_steps": 10})
        evaluate = recipe.evaluate.model_dump() | {"prompts": sets}
        return warnings_without_effect(
            Recipe.model_validate(recipe.model_dump() | {"evaluate": evaluate})
        )

    (words,) = told(edit=EDITED, **more)
    assert words.startswith("train.sample_every_n_steps draws nothing, since all prompts have ref")
    assert not told(edit=EDITED, plain={"prompts": ["a seven"]}, **more)


def test_keys_leave_settings_without_effect_out() -> None:
    def keys(recipe: Recipe) -> list[dict[str, Any]]:
        return [stage.settings_for_key(recipe) for stage in (encode, evaluate, publish)]

    plain = load_recipe("digits")
    unused = {"encode.seed": 1, "encode.max_aspect": 3.0, "publish.merge": True}
    given = load_recipe("digits", unused)
    assert keys(with_defaults_without_effect(given)) == keys(plain)
    assert all(a != b for a, b in zip(keys(given), keys(plain), strict=True))


def test_a_recipe_may_inherit_a_setting_without_effect(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: digits-lora\ntrain: {method: full}\n", encoding="utf-8")
    recipe = load_recipe(str(path))
    names = {name for name, _ in recipe.without_effect()}
    assert "publish.merge" in names
    assert not with_defaults_without_effect(recipe).publish.merge


@pytest.mark.parametrize("name", recipe_names())
def test_every_setting_of_a_shipped_recipe_has_an_effect(name: str) -> None:
    recipe = load_recipe(name)
    assert list(recipe.without_effect()) == []
    assert with_defaults_without_effect(recipe) is recipe
