"""Masks of the loss: which settings go together."""

from typing import Any

import pytest
from pydantic import ValidationError
from shortest_recipe import shortest_recipe

from configs.settings.recipe import Recipe, warnings_without_effect
from configs.settings.train import Train

FOLDER = {"kind": "folder", "path": "."}
MASKED = {**FOLDER, "mask": "alpha"}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"source": FOLDER, "train": {"masked_loss": {}}}, "requires masks: set source.mask"),
        (
            {
                "source": MASKED,
                "train": {"masked_loss": {}, "inpainting": True},
                "encode": {"masks": 1},
            },
            "masked_loss requires inpainting: false",
        ),
        ({"source": {"kind": "digits", "mask": "alpha"}}, "mask"),
    ],
)
def test_a_masked_loss_needs_masks_of_its_own(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        shortest_recipe(**sections)


def test_masks_that_are_not_trained_with_are_told() -> None:
    (words,) = warnings_without_effect(shortest_recipe(source=MASKED))
    assert words.startswith("source.mask: its masks are not trained with")
    assert not warnings_without_effect(shortest_recipe(source=MASKED, train={"masked_loss": {}}))


def test_one_source_of_a_mixture_may_have_masks() -> None:
    def mixture(**sources: dict[str, str]) -> Recipe:
        settings = shortest_recipe().model_dump(exclude={"source"})
        settings["sources"] = {name: {"source": source} for name, source in sources.items()}
        return Recipe.model_validate({**settings, "train": {"masked_loss": {}}})

    recipe = mixture(subject=MASKED, style=FOLDER)
    assert recipe.has_masks and not warnings_without_effect(recipe)
    with pytest.raises(ValidationError, match="requires masks"):
        mixture(subject=FOLDER, style=FOLDER)


def test_trainings_without_masks_keep_their_keys() -> None:
    assert "masked_loss" not in Train().key_settings()
    assert "masked_loss" not in Train().holdout_loss_inputs
    masked = Train.model_validate({"masked_loss": {"unmasked_weight": 0.1}})
    chosen = {"unmasked_weight": 0.1, "area_normalised": False}
    assert (
        masked.key_settings()["masked_loss"] == masked.holdout_loss_inputs["masked_loss"] == chosen
    )
