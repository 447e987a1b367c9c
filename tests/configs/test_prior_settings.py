"""Prior targets need a frozen base; recipes without one are refused before work starts."""

from typing import Any

import pytest
from shortest_recipe import shortest_recipe

from configs.settings.recipe import Recipe

GRAPHS = {"mode": "lazy", "graphs": True}


def mixture(train: dict[str, Any], regularisation: str | None = "prior") -> Recipe:
    settings = shortest_recipe().model_dump(mode="json", exclude={"source"})
    pictures = {"source": {"kind": "folder", "path": "."}}
    sources = {"style": pictures, "old": {**pictures, "regularisation": regularisation}}
    return Recipe.model_validate({**settings, "sources": sources, "train": train})


@pytest.mark.parametrize(
    ("train", "named"),
    [
        ({"init": "random"}, "train.init"),
        ({"method": "lora", "hpu": GRAPHS, "device": "hpu"}, "train.hpu.graphs"),
    ],
)
def test_a_recipe_whose_base_is_not_there_is_refused(train: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"regularisation: prior .*{named}"):
        mixture(train)
    assert not mixture(train, None).has_prior


@pytest.mark.parametrize("train", [{"method": "full", "fsdp": "all"}, {"method": "lora"}], ids=str)
def test_others_have_a_base(train: dict[str, Any]) -> None:
    assert mixture(train).has_prior
