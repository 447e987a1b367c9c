"""The model card: numbers, code, and hostile metadata of the base."""

import ast
import re
import time
from pathlib import Path

import pytest

from configs.load import load_recipe
from tasks.evaluate.metric_suite import metric_rows
from tasks.publish.model_card import Weights, base_card, write_card


def test_each_model_has_its_own_column() -> None:
    measured = {
        "base": {"value": 5.0, "n": 10, "ci": [4.0, 6.0]},
        "tuned": {"value": 1.0, "n": 12, "ci": [0.5, 1.5]},
    }
    assert metric_rows({"cmmd": measured, "fd": {"tuned": measured["tuned"]}}) == [
        {"metric": "cmmd", "base": "5 [4, 6]", "tuned": "1 [0.5, 1.5]", "samples": 12},
        {"metric": "fd", "base": "—", "tuned": "1 [0.5, 1.5]", "samples": 12},
    ]


def test_aliases_in_a_base_s_card_do_not_expand(tmp_path: Path) -> None:
    """Nine levels of ten aliases expand to a gigabyte of text."""
    levels = ["a0: &a0 lol"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    text = "\n".join(["---", *levels, "license: *a9", "license_name: x", "---", ""])
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    begun = time.monotonic()
    assert base_card(tmp_path) == {"license_name": "x"}
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("score", [True, False])
@pytest.mark.parametrize("inpainting", [True, False])
@pytest.mark.parametrize(
    "weights",
    [Weights(True), Weights(True, True), Weights(False, True), Weights(False, True, True)],
)
def test_the_code_of_every_kind_of_card_is_python(
    weights: Weights, inpainting: bool, score: bool, tmp_path: Path
) -> None:
    recipe = load_recipe("digits", {"model.vae": "a/vae"})
    train = recipe.train.model_copy(update={"inpainting": inpainting, "aesthetic_score": score})
    recipe = recipe.model_copy(update={"train": train})
    card = write_card(recipe, tmp_path, {}, [], {"images": "abc"}, weights)
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    ast.parse(code)
    assert ("mask_image=mask" in code) == inpainting
    assert ('kwargs | {"class_labels": scores}' in code) == score
    assert ("load_lora_weights" in code) == ("VAE 'a/vae'" in code) == (not weights.pipeline)
    assert ("scheduler/: load it" in code) == weights.scheduler
    assert "\n\n\n" not in code and not code.endswith("\n\n")
    assert ("Adapters of rank 16" in card) == weights.adapters
