"""Settings of references: what does not go with them, and which keys know them."""

from typing import Any

import pytest
from pydantic import ValidationError
from shortest_recipe import shortest_recipe

from configs.settings.recipe import Recipe

SOURCE = {"kind": "urls", "path": "list.parquet", "reference_columns": ["before"]}


def recipe_of(source: dict[str, Any] = SOURCE, **settings: Any) -> Recipe:
    return shortest_recipe(source=source, **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"encode": {"flip": True}}, "encode.flip would mirror pictures and not their references"),
        ({"runtime": "mindspore"}, "references require runtime torch or jax, not mindspore"),
        ({"runtime": "xla"}, "references require runtime torch or jax, not xla"),
        (
            {"train": {"inpainting": True}, "encode": {"masks": 4}},
            "train.inpainting: an edit model has references instead",
        ),
    ],
)
def test_what_does_not_go_with_references_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        recipe_of(**settings)


def test_dropout_of_references_needs_references() -> None:
    plain = {"kind": "urls", "path": "list.parquet"}
    with pytest.raises(ValidationError, match="reference_dropout_rate requires references"):
        recipe_of(plain, train={"reference_dropout_rate": 0.1})
    assert recipe_of(train={"reference_dropout_rate": 0.1}).has_references


def test_a_source_without_references_may_be_beside_one_with_them() -> None:
    sources = {
        "edits": {"source": SOURCE},
        "plain": {"source": {"kind": "folder", "path": "p"}, "encode": {"flip": True}},
    }
    train = {"reference_dropout_rate": 0.1}
    settings = {n: v for n, v in shortest_recipe(train=train, source=SOURCE) if n != "source"}
    recipe = Recipe.model_validate({**settings, "sources": sources})
    assert recipe.has_references
    assert not recipe.of_source("plain").has_references


def test_keys_without_references_are_those_of_before() -> None:
    settings = recipe_of({"kind": "urls", "path": "list.parquet"})
    assert "reference_dropout_rate" not in settings.train.key_settings()
    assert "reference_pixels" not in settings.encode.key_settings()
    dropping = recipe_of(train={"reference_dropout_rate": 0.1})
    assert dropping.train.key_settings()["reference_dropout_rate"] == 0.1
