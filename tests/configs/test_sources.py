"""Named sources: their sections, what is refused, and the samples of an epoch."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from configs.errors import Refused
from configs.load_recipe import dump, load_recipe, parse_yaml
from configs.settings.recipe import Recipe
from configs.settings.sources import samples_per_epoch

SUBJECT = {"source": {"kind": "folder", "path": "/subject"}}


def mixture(**sources: dict[str, Any]) -> Recipe:
    return load_recipe("digits", {"sources": {"subject": SUBJECT, **sources}})


def test_a_source_has_its_own_sections_over_those_it_is_like_and_the_recipes() -> None:
    subject = {**SUBJECT, "encode": {"flip": True, "holdout": 0.5}, "select": {"limit": 9}}
    old = {"like": "subject", "encode": {"holdout": 0.0}, "select": None}
    recipe = mixture(subject=subject, old=old)
    part = recipe.of_source("old")
    assert part.source == recipe.of_source("subject").source
    assert part.encode == recipe.encode.model_copy(update={"flip": True, "holdout": 0.0})
    assert part.select is None and recipe.of_source("subject").select is not None
    assert part.train == recipe.train and not part.sources
    assert Recipe.model_validate(parse_yaml(dump(recipe))) == recipe


def test_a_mixture_replaces_an_inherited_source_and_the_reverse(tmp_path: Path) -> None:
    mixed, single = tmp_path / "mixed.yaml", tmp_path / "single.yaml"
    source = "{kind: folder, path: ./pictures}"
    mixed.write_text(f"extends: digits\nsources: {{a: {{source: {source}}}}}\n")
    single.write_text(f"extends: ./mixed.yaml\nsource: {source}\n")
    assert load_recipe(str(mixed)).of_source("a").source == load_recipe(str(single)).source
    assert not load_recipe(str(single)).sources


@pytest.mark.parametrize(
    ("sources", "why"),
    [
        ({"old": {"like": "sbject"}}, "old.like: there is no source sbject: name one of subject"),
        ({"a": {"like": "b"}, "b": {"like": "a"}}, "a.like: a is like b is like a: set source"),
        ({"old": {}}, "old: source is missing: set source, or like to the name of another"),
        ({"Old": SUBJECT}, "Old: a name has small letters, digits, _ and -"),
        (
            {"old": {**SUBJECT, "weight": 0.5, "repeats": 2}},
            "old: weight and repeats: set one, the share of the samples or the times per epoch",
        ),
        ({"old": {**SUBJECT, "weight": 1}}, "the weights sum to 1, and leave nothing to the"),
        (
            {"subject": {**SUBJECT, "regularisation": "prior"}},
            "all have regularisation: leave it out of the sources to learn",
        ),
        (
            {"old": {**SUBJECT, "encode": {"dtype": "float16"}}},
            "old.encode.dtype: all sources of a mixture have the same: set encode.dtype",
        ),
        (
            {"old": {**SUBJECT, "download": {"image_siz": 9}}},
            "old: download.image_siz: unknown setting (did you mean download.image_size?)",
        ),
        ({"old": {"source": {"kind": "folder"}}}, "old: source.path: missing; it must be set"),
    ],
)
def test_a_wrong_mixture_is_refused_in_one_line(sources: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused) as error:
        mixture(**sources)
    assert why in str(error.value) and "\n" not in str(error.value)


def test_a_recipe_has_a_source_or_sources() -> None:
    with pytest.raises(Refused, match="source and sources: set one"):
        load_recipe("digits", {"sources": {"a": SUBJECT}, "source": {"kind": "digits"}})
    with pytest.raises(Refused, match="source: missing; set it, or sources for a mixture"):
        load_recipe("digits", {"sources": {}})


@pytest.mark.parametrize(
    ("sources", "samples"),
    [
        ({"a": {}, "b": {"repeats": 2.5}}, {"a": 60, "b": 1500}),
        ({"a": {"weight": 3}, "b": {"weight": 1}}, {"a": 495, "b": 165}),  # of 660
        ({"a": {"weight": 0.25}, "b": {}}, {"a": 200, "b": 600}),
        # kohya's rule: as many as of the sources to learn
        ({"a": {"repeats": 5}, "b": {"regularisation": "images"}}, {"a": 300, "b": 300}),
        (
            {"a": {"repeats": 10}, "b": {"regularisation": "images", "repeats": 1}},
            {"a": 600, "b": 600},
        ),
        ({"a": {}, "b": {"regularisation": "prior"}}, {"a": 60, "b": 600}),
        ({"a": {"weight": 0.1}, "b": {"weight": 0.2}}, {"a": 220, "b": 440}),  # of 0.3
    ],
)
def test_the_samples_of_an_epoch(sources: dict[str, Any], samples: dict[str, int]) -> None:
    given = {name: {**SUBJECT, **source} for name, source in sources.items()}
    mixed = load_recipe("digits", {"sources": given}).mixture
    found = samples_per_epoch(mixed, {"a": 60, "b": 600})
    assert found == {name: Fraction(n) for name, n in samples.items()}
