"""Shipped recipes: the metrics of their gates, and their toy overrides."""

from pathlib import Path
from typing import Any

import pytest
from toy_recipes import BASES, toy

from configs.load_recipe import load_recipe, recipe_names
from tasks.evaluate.metric_names import metric_names
from tasks.publish.gate import check_rules


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
