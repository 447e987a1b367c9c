"""A setting says itself whether keys have it, and what a training reads of it."""

from collections.abc import Iterator
from typing import Any

import pytest
from kiln_command import ROOT

from configs.load_recipe import load_recipe
from configs.settings.base_section import Section, facts_of, settings_of
from configs.settings.recipe import Recipe
from configs.settings.sources import MixtureSource
from configs.settings.train import Train
from configs.settings.train_parts import BestCheckpoint, MaskedLoss
from tasks import download, train
from tasks.encode import crop_to_bucket as encode
from tasks.evaluate import stage as evaluate
from tasks.publish import stage as publish

STAGES = (download, encode, train, evaluate, publish)
FACTS = {name: facts_of(field) for name, field in settings_of(Recipe)}


def reason(name: str) -> str | None:
    """Why no key has a setting, by itself or by the section that holds it."""
    while name:
        if "not_in_key" in FACTS[name]:
            return str(FACTS[name]["not_in_key"])
        name = name.rpartition(".")[0]
    return None


def leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of each setting; those of a section that is null are not there."""
    for name, value in section:
        if isinstance(value, Section):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def another(value: Any) -> Any:
    """Another value, which no validator sees."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return {str: "other", tuple: ("other",), dict: {"other": 1}}.get(type(value), 7)


def changed(section: Any, name: str, value: Any) -> Any:
    first, _, rest = name.partition(".")
    new = changed(getattr(section, first), rest, value) if rest else value
    return section.model_copy(update={first: new})


def keys(recipe: Recipe) -> list[Any]:
    own = [stage.settings_for_key(recipe) for stage in STAGES]
    sections = (recipe.describe, recipe.select, recipe.caption, recipe.retrain)
    return [*own, *(section and section.key_settings() for section in sections)]


#: Settings whose value the key reads.
OTHERS = {
    "train.best_checkpoint": BestCheckpoint(),
    "train.masked_loss": MaskedLoss(),
    "sources": {"a": MixtureSource(like="b")},
    "train.denoiser_config": str(ROOT / "demo/base/unet/config.json"),
}
OPTIONAL: dict[str, Any] = {"describe": {}, "select": {}, "caption": {}}
RECIPE = changed(  # to a method whose section has settings of its own in the key
    load_recipe("digits", {"train.best_checkpoint": None, "train.loss": "huber", **OPTIONAL}),
    *("train.method", "controlnet"),
)
VALUES = dict(leaves(RECIPE))


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("name", VALUES)
def test_every_setting_is_in_a_key_or_says_why_not(name: str) -> None:
    other = OTHERS.get(name, another(VALUES[name]))
    why = reason(name)
    if why != "content":  # keys have the content instead
        assert (keys(changed(RECIPE, name, other)) == keys(RECIPE)) == (why is not None), why


def test_the_settings_that_weights_fix() -> None:
    adapters = {"method", "lora", "controlnet", "train_text_encoder"}
    adapters |= {"inpainting", "aesthetic_score"}
    schedule = {"prediction_type", "zero_terminal_snr"}
    assert Train.names_with("fixed_by_weights") == adapters | schedule
