"""Recipes load, say what is wrong with them, and repeat themselves."""

import json
from pathlib import Path

import pytest

from configs.load import (
    RecipeError,
    dump,
    json_schema,
    load_recipe,
    parse_override,
    recipe_names,
)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_valid(name: str) -> None:
    assert load_recipe(name).name == name


def test_the_recipes_users_are_told_of_are_there() -> None:
    assert {"digits", "sdxl", "sdxl-lora", "sd2"} <= set(recipe_names())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"train.learning_rat": 1}, "train.learning_rat: unknown setting (did you mean train.lea"),
        ({"trian.steps": 1}, "trian: unknown setting (did you mean train?)"),
        ({"source.prot": 1}, "source.prot: unknown setting (did you mean source.port?)"),
        ({"train.steps": "many"}, "train.steps: Input should be a valid integer"),
        ({"train.steps": 0}, "train.steps: Input should be greater than 0 (got 0)"),
        ({"runtime": "tpu"}, "runtime: Input should be 'torch'"),
        ({"name.x": 1}, "name is a value, not a section"),
        ({"source.kind": "ftp"}, "source"),
        (
            {"train.snr_gamma": 5.0, "train.debiased_estimation_loss": True},
            "train: snr_gamma and debiased_estimation_loss",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_file_and_path(overrides, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("digits", overrides)
    assert words in str(caught.value) and len(str(caught.value)) < 200
    assert str(caught.value).startswith(("digits.yaml: ", "override "))


@pytest.mark.parametrize("name", ["digit", "nowhere.yaml"])
def test_an_unknown_recipe_names_the_nearest(name: str) -> None:
    with pytest.raises(RecipeError, match="not found"):
        load_recipe(name)


@pytest.mark.parametrize("text", ["a: [", "- 1", "extends: loop.yaml"])
def test_a_file_that_is_no_recipe_is_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError, match=r"loop\.yaml"):
        load_recipe("loop.yaml")


def test_extends_changes_what_it_says_and_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: digits\nname: mine\ntrain: {steps: 7}\n", encoding="utf-8")
    recipe, parent = load_recipe(str(path)), load_recipe("digits")
    assert recipe.train.steps == 7
    assert recipe.train.learning_rate == parent.train.learning_rate
    assert recipe.source == parent.source


def test_another_kind_of_source_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: digits\nsource: {kind: folder, path: ./pictures}\n", encoding="utf-8")
    source = load_recipe(str(path)).source
    assert source.kind == "folder"
    assert source.path == str(tmp_path / "pictures")  # ./ is beside the file that says it


def test_a_dumped_recipe_is_enough_to_repeat_it(tmp_path: Path) -> None:
    recipe = load_recipe("digits", {"train.learning_rate": 1e-5, "beam.runner": "DirectRunner"})
    path = tmp_path / "again.yaml"
    path.write_text(dump(recipe), encoding="utf-8")
    assert load_recipe(str(path)) == recipe


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.steps=10", ("train.steps", 10)),
        ("train.learning_rate=1e-5", ("train.learning_rate", 1e-5)),
        ("publish.gate=[]", ("publish.gate", [])),
        ("store=gs://b/x=y", ("store", "gs://b/x=y")),
    ],
)
def test_overrides_are_read_as_yaml(text: str, expected) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["train.steps", "=3", "a=["])
def test_an_override_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="override"):
        parse_override(text)


def test_the_schema_file_is_that_of_the_code() -> None:
    path = Path(__file__).parents[2] / "docs/recipe.schema.json"
    assert json.loads(path.read_text(encoding="utf-8")) == json_schema()


def test_an_override_of_a_section_keeps_what_it_does_not_say() -> None:
    recipe, plain = load_recipe("digits", {"train": {"steps": 7}}), load_recipe("digits")
    assert recipe.train == plain.train.model_copy(update={"steps": 7})


def test_a_dumped_recipe_says_no_password() -> None:
    url = "https://me:secret@example.org/model?token=hidden"
    text = dump(load_recipe("digits", {"model.path": url}))
    assert "example.org/model" in text
    assert "secret" not in text and "hidden" not in text
