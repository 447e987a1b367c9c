"""The shipped gates let models without a fault pass, and refuse those with one."""

import json
from functools import cache

import pytest
import simulated_gate
from simulated_gate import BAD, HARMFUL, HARMLESS, SPREADS, decisions, redistributed, shares

from configs.load_recipe import load_recipe, recipe_names
from tasks.publish.promotion_gate import parse_rule

DRAWS = 100
RESAMPLES = 200
OLD = "clip_score/old >= base * 0.9 at 95%"


def leveled(name: str) -> list[str]:
    return [text for text in load_recipe(name).publish.gate if parse_rule(text).level is not None]


@cache
def shares_of_shape(shape: str, name: str, lost: float) -> dict[str, float]:
    """Recipes with equal rules and numbers of pictures have equal shares."""
    return shares(load_recipe(name, {"evaluate.bootstrap": RESAMPLES}), lost, DRAWS)


FIRST: dict[str, str] = {}  # shape -> the first recipe that has it


def simulated(name: str, lost: float) -> dict[str, float]:
    sets = load_recipe(name).evaluate.prompts.items()
    sizes = {key: (len(one.prompts), one.images_per_prompt, one.compare) for key, one in sets}
    shape = json.dumps([sizes, leveled(name)])
    return shares_of_shape(shape, FIRST.setdefault(shape, name), lost)


@pytest.mark.parametrize("name", [name for name in recipe_names() if leveled(name)])
def test_a_shipped_gate_lets_harmless_models_pass_and_no_harmful_ones(name: str) -> None:
    """By the rules with a level: 95% of intervals have the truth, 2.5% are on its wrong side."""
    harmless = simulated(name, HARMLESS)
    assert harmless.keys() == {*leveled(name), "all", "rounds"}
    assert harmless["all"] >= 0.95 and harmless["rounds"] <= 1.5
    harmful = simulated(name, HARMFUL)
    assert max(harmful[text] for text in leveled(name)) <= 0.05
    bad = simulated(name, BAD)
    assert max(bad[text] for text in leveled(name)) <= 0.05


@pytest.mark.parametrize("name", ["sdxl", "flux-lora"])
@pytest.mark.parametrize("words", SPREADS)
def test_old_prompts_are_enough_for_other_spreads(name: str, words: str) -> None:
    rule = parse_rule(OLD)
    made = [*decisions(load_recipe(name), rule, HARMLESS, DRAWS, SPREADS[words])]
    assert sum(decision.passed for decision in made) >= 0.95 * DRAWS


def test_two_prompts_with_as_many_pictures_would_refuse_harmless_models() -> None:
    """The simulation tells gates apart."""
    recipe = redistributed(load_recipe("sdxl"), {"old": 2})
    assert recipe.evaluate.prompts["old"].images_per_prompt == 8
    made = [*decisions(recipe, parse_rule(OLD), HARMLESS, DRAWS)]
    assert 0.4 < sum(decision.passed for decision in made) / DRAWS < 0.7


def test_the_table_has_each_recipe_and_spread(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        simulated_gate.main(["--recipes", "sdxl", "laion-jax", "--draws", "2", "--old", "4"]) == 0
    )
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert {f"sdxl, {words}" for words in SPREADS} < figures.keys()
    harmless = figures["sdxl, as assumed"][f"{OLD}, harmless"]
    assert 0 <= harmless <= 1
