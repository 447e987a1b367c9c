"""Missing targets and configs are found before any work."""

from pathlib import Path

import pytest

from configs.load_recipe import load_recipe
from runtimes.contract import WrongInput
from tasks import train
from tasks.check_training_targets import check


def test_adapter_targets_are_checked_in_the_bases_files(tiny_sdxl: Path) -> None:
    lora = {"train.method": "lora"}
    for targets in ("attention", "linear", "all", ["conv1", "to_q"]):
        check(load_recipe("digits", {**lora, "train.lora.target_modules": targets}), tiny_sdxl)
    recipe = load_recipe("digits", {**lora, "train.lora.target_modules": ["to_x"]})
    with pytest.raises(WrongInput, match=r"no layer of the unet ends in to_x \(there are: "):
        check(recipe, tiny_sdxl)


def test_the_content_of_a_denoiser_config_is_in_the_key(tiny_sdxl: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    recipe = load_recipe("digits", {"train.init": "random", "train.denoiser_config": str(path)})
    with pytest.raises(WrongInput, match=r"config\.json: not there; a model's config was expected"):
        check(recipe, tiny_sdxl)
    path.write_text('{"a": 1}')
    with pytest.raises(WrongInput, match=r"train\.denoiser_config: _class_name is missing"):
        check(recipe, tiny_sdxl)
    path.write_text((tiny_sdxl / "unet/config.json").read_text())
    check(recipe, tiny_sdxl)
    path.write_text('{"a": 1}')
    one = train.settings_for_key(recipe)
    moved = tmp_path / "moved.json"
    moved.write_text('{ "a": 1 }')
    named = {"train.init": "random", "train.denoiser_config": str(moved)}
    assert train.settings_for_key(load_recipe("digits", named)) == one
    path.write_text('{"a": 2}')
    assert train.settings_for_key(recipe) != one
