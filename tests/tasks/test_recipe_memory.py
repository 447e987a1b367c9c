"""Stored plans of shipped recipes are those of the planner; the table of the docs is theirs."""

from pathlib import Path

import pytest

from bench.recipe_memory import (
    DOCUMENT,
    TABLE,
    card,
    plan_recipes,
    planned_recipes,
    recipe_memory_table,
)
from configs.load_recipe import load_recipe
from runtimes.torch_models.gpu_specs import GIB, parse_gpu
from tasks.plan.shipped_plans import (
    RecipeMemory,
    digest_settings,
    memory_of,
    read_table,
    shipped_plans,
)


def test_stored_plans_are_of_the_present_settings() -> None:
    """Otherwise: python -m bench.recipe_memory --write."""
    found = [memory.recipe for memory in shipped_plans()]
    assert sorted(found) == sorted(planned_recipes())
    for name in found:
        assert (plan := memory_of(load_recipe(name))) is not None and plan.recipe == name


def test_a_setting_that_changes_the_memory_has_no_stored_plan() -> None:
    for overrides in (
        {"train.micro_batch_size": 1},
        {"encode.resolution": 512},
        {"evaluate.batch_size": 1},
        {"evaluate.height": 512},
        {"evaluate.offload": True},
        {"train.lora.rank": 64},
        {"model.path": "some/other"},
    ):
        assert memory_of(load_recipe("sdxl-lora", overrides)) is None
    assert memory_of(load_recipe("digits", {"model.path": "/models/flux/base"})) is None
    mine = load_recipe("sdxl-lora", {"source.path": "my/pictures", "store": "elsewhere"})
    assert memory_of(mine) is not None


def test_stored_hours_are_those_of_the_recipes_arithmetic() -> None:
    gpu = parse_gpu("H100").spec
    plain = memory_of(load_recipe("digits"))
    tf32 = memory_of(load_recipe("digits", {"train.allow_tf32": True}))
    assert gpu and plain and tf32 and (hours := plain.hours(gpu)) and (faster := tf32.hours(gpu))
    assert hours / faster == pytest.approx(989.5 / 2 / 67)


def test_the_table_of_the_documents_is_that_of_the_plans() -> None:
    found = TABLE.search(DOCUMENT.read_text(encoding="utf-8"))
    assert found and found[0].splitlines() == list(recipe_memory_table())


def test_the_readmes_example_fits_a_card_of_24_gb() -> None:
    (plan,) = [plan for plan in shipped_plans() if plan.recipe == "sdxl-lora"]
    assert plan.fits(24 * GIB) and card(plan) == 16
    (large,) = [plan for plan in shipped_plans() if plan.recipe == "sdxl"]
    assert not large.fits(24 * GIB) and card(large) == 80


@pytest.mark.parametrize(
    "plan", [p for p in shipped_plans() if p.recipe.endswith("gb")], ids=lambda plan: plan.recipe
)
def test_a_recipe_named_for_a_card_fits_it(plan: RecipeMemory) -> None:
    size = int(plan.recipe.rpartition("-")[2].removesuffix("gb"))
    assert plan.fits(size * GIB), "otherwise: `kiln plan` names the settings"
    hours = [
        plan.hours(spec) for name in ("3060", "4070", "4090") if (spec := parse_gpu(name).spec)
    ]
    assert all(hours) and len(hours) == 3


#: The cheapest plan of true size is made in the gate.
PLANNED = [
    pytest.param(
        p.recipe, marks=pytest.mark.extended if p.recipe == "sd15-lora" else pytest.mark.soak
    )
    for p in shipped_plans()
]


@pytest.mark.parametrize("name", PLANNED)
def test_a_stored_plan_is_that_of_the_planner(name: str, tmp_path: Path) -> None:
    (found,) = plan_recipes([name], tmp_path)
    assert found == read_table()[digest_settings(load_recipe(name))]
