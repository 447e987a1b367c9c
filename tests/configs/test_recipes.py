"""Shipped recipes: the metrics of their gates, and their toy overrides."""

import csv
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from toy_recipes import BASES, toy

from configs.load_recipe import load_recipe, recipe_names
from tasks.evaluate.metrics import metric_names, prompt_sets
from tasks.publish.promotion_gate import check_prompts, check_rules, parse_rule


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    found: dict[str, Any] = {}
    for name, inner in value.items():
        found |= flat(inner, f"{prefix}.{name}" if prefix else name)
    return found


@pytest.mark.parametrize("name", recipe_names())
def test_gate_of_a_recipe_uses_its_metrics(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.publish.gate
    check_rules(recipe.publish.gate, metric_names(recipe), recipe.evaluate.bootstrap)
    assert [*check_prompts(recipe.publish.gate, recipe.evaluate)] == []


@pytest.mark.parametrize("name", recipe_names())
def test_gate_of_a_recipe_bounds_copies_compares_with_confidence_and_knows_the_licence(
    name: str,
) -> None:
    recipe = load_recipe(name)
    rules = [parse_rule(text) for text in recipe.publish.gate]
    bounds = {one.metric: one.number for one in rules if one.op in ("<", "<=")}
    assert (bounds.get("memorized") or 1) <= 0.05, "copies by features"
    assert (bounds.get("memorized_pixels") or 1) <= 0.02, "copies by pixels"
    pictures = sum(map(len, prompt_sets(recipe.evaluate).values()))
    assert pictures >= 40, "enough samples to find a copy among"
    beats = [one for one in rules if one.model == "base" and one.op in ("<", ">")]
    assert all(one.level == 0.95 for one in beats), "better than the base by more than chance"
    compared = {one.metric for one in beats}
    assert compared >= {"cmmd", "holdout_loss"} or recipe.train.init == "random"
    assert recipe.publish.require_license


def test_every_recipe_with_a_hub_model_has_a_tiny_model() -> None:
    hub = {name for name in recipe_names() if not load_recipe(name).model.path.startswith("/")}
    assert hub == BASES.keys()


@pytest.mark.parametrize("name", BASES)
def test_toy_overrides_change_only_sizes_and_paths(name: str, tmp_path: Path) -> None:
    overrides = toy(name, tmp_path, {"kind": "folder", "path": "."}, Path)
    before, after = (flat(load_recipe(name, o).model_dump()) for o in ({}, overrides))
    changed = {dotted for dotted in before | after if before.get(dotted) != after.get(dotted)}
    assert {dotted for dotted in changed if not dotted.startswith("source.")} <= overrides.keys()
    kept = {"runtime", "train.method", "train.learning_rate", "train.mixed_precision", "train.mesh"}
    assert not kept & changed and "train.steps" in changed


#: Repositories of the hub that recipes name, with the date and the place where each was last seen.
HUB_IDS = Path(__file__).with_name("hub_ids.csv")
#: Names that left the hub: Stable Diffusion 2 in November 2025 (diffusers issue 12874).
WITHDRAWN = ("stabilityai/stable-diffusion-2", "lambdalabs/")


def hub_ids(name: str) -> set[tuple[str, str]]:
    """(kind, id) of the hub's repositories in a recipe."""
    recipe = load_recipe(name)
    settings = recipe.evaluate
    models = [recipe.model.path, recipe.model.vae, settings.clip, settings.image_encoder]
    models += settings.preference_models.values()
    found = {("model", path) for path in models if path is not None and not Path(path).exists()}
    sources = [recipe.of_source(one).source for one in recipe.sources] or [recipe.source]
    return found | {("dataset", one.path) for one in sources if one.kind == "dataset"}


def test_every_hub_id_of_a_recipe_has_a_date_when_it_was_last_seen() -> None:
    with HUB_IDS.open(encoding="utf-8", newline="") as stream:
        seen = {(row["kind"], row["id"]): row for row in csv.DictReader(stream)}
    assert seen.keys() == set().union(*(hub_ids(name) for name in recipe_names()))
    for row in seen.values():
        assert date.fromisoformat(row["last_seen"]) > date(2023, 12, 31) and row["where"]
        assert not row["id"].startswith(WITHDRAWN)
