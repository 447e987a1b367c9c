"""The trials of a sweep: one per combination of values, each valid, no two alike."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from configs.errors import Refused
from configs.load_recipe import add_values, json_schema, load_trials, parse_values, parse_yaml


def sweep(**values: Any) -> dict[str, Any]:
    return {"sweep.values": {name.replace("__", "."): value for name, value in values.items()}}


def test_values_of_several_settings_form_a_grid() -> None:
    given = dict(map(parse_values, ["train.learning_rate=1e-4,3e-5", "train.seed=0,7"]))
    trials = load_trials("digits", {"sweep.values": given, "train.steps": 9})
    found = [(trial.recipe.train.learning_rate, trial.recipe.train.seed) for trial in trials]
    assert found == [(1e-4, 0), (1e-4, 7), (3e-5, 0), (3e-5, 7)]
    assert {trial.recipe.train.steps for trial in trials} == {9}
    assert trials[1].settings == {"train.learning_rate": 1e-4, "train.seed": 7}
    assert trials[1].label == "learning_rate=0.0001 seed=7"


def test_values_may_be_lists_and_words() -> None:
    assert parse_values("train.adam_betas=[0.9,0.99],[0.8,0.9]")[1] == [[0.9, 0.99], [0.8, 0.9]]
    assert parse_values("train.snr_gamma=null,5.0") == ("train.snr_gamma", [None, 5.0])
    assert parse_values("train.method=full,lora") == ("train.method", ["full", "lora"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (sweep(train__learning_rate=[1e-4, -1]), r"train\.learning_rate: .*greater than 0"),
        (sweep(train__lerning_rate=[1]), r"did you mean train\.learning_rate"),
        (sweep(encode__resolution=[64]), r"encode\.resolution cannot be swept: .*`train`"),
        (sweep(caption__processes=[1, 2]), "train equal weights"),
        (sweep(train__seed=[]), r"train\.seed has no values"),
        (sweep(train__device=["cpu", "auto"]), "train equal weights"),
        (sweep(train__lora__rank=[4, 8]), "train equal weights"),  # train.method is full
        (sweep(train__timesteps__logit_mean=[0.5, 1.0]), "train equal weights"),  # for logit_normal
        ({"sweep": {"value": {}}}, r"did you mean sweep\.values"),
    ],
)
def test_wrong_values_are_refused(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words) as refused:
        load_trials("digits", overrides)
    assert "\n" not in str(refused.value)


def test_null_drops_an_inherited_setting_from_the_grid(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = "extends: digits\nsweep: {values: {train.learning_rate: null, train.seed: [0, 1]}}\n"
    path.write_text(text, encoding="utf-8")
    assert [trial.settings for trial in load_trials(str(path), {})] == [
        {"train.seed": 0},
        {"train.seed": 1},
    ]
    jsonschema.validate(parse_yaml(text), json_schema())


def test_a_recipe_without_values_names_the_remedy() -> None:
    with pytest.raises(Refused, match=r"nothing to sweep: set sweep\.values, or add `--set"):
        load_trials("sdxl", {})


@pytest.mark.parametrize("text", ["train.seed", "=1,2", "train.seed=1,[", "train.seed={"])
def test_malformed_values_are_refused(text: str) -> None:
    with pytest.raises(Refused, match="write it as key=value,value"):
        parse_values(text)


def test_a_setting_is_given_once() -> None:
    assert add_values({}, ["train.seed=0,1", "train.steps=5"]) == {
        "sweep.values": {"train.seed": [0, 1], "train.steps": [5]}
    }
    with pytest.raises(Refused, match="is given twice"):
        add_values({}, ["train.seed=0", "train.seed=1"])


def test_options_add_to_the_values_of_an_override() -> None:
    given = {"train.steps": 9, "sweep.values": {"train.seed": [7], "train.snr_gamma": [5.0]}}
    found = add_values(given, ["train.seed=0,1"])
    values = {"train.seed": [0, 1], "train.snr_gamma": [5.0]}
    assert found == {"train.steps": 9, "sweep.values": values}
    assert add_values(given, []) == given
    assert add_values({"sweep.values": 3}, ["train.seed=0"]) == {"sweep.values": 3}


def test_captioners_can_be_swept() -> None:
    captioners = ["owner/small", "owner/large"]
    trials = load_trials("digits", sweep(caption__model=captioners, train__learning_rate=None))
    assert [trial.recipe.caption and trial.recipe.caption.model for trial in trials] == captioners
