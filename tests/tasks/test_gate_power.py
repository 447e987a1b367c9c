"""Rules of gates are decidable: shipped ones by simulation, others by what is told before a run."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from artifacts.latent_shards import Latents, ShardRef
from artifacts.store import KeyParts, Store
from bench import gate_power as simulated
from bench.gate_power import BAD, BORDERLINE, SPREADS, decisions, rules_of, share
from configs.errors import Refused
from configs.load_recipe import CHECKOUT, load_recipe, recipe_names
from configs.settings.recipe import Recipe
from flows.run import check_gate_rules
from flows.show_plan import show_plan
from tasks.build_or_reuse import BOOTSTRAP, METRICS
from tasks.evaluate.distances import Resampling, mean, to_npz
from tasks.evaluate.metrics import most_rounds
from tasks.evaluate.stage import measured_by, metrics_by_name
from tasks.publish.gate_power import (
    HARMLESS,
    difference_of,
    looks_of,
    newest_estimates,
    probability,
    undecidable,
)
from tasks.publish.promotion_gate import parse_rule

DRAWS = 100
#: Too few pictures are drawn to tell models with twice these shares (docs/internals/evaluation.md).
COPIES = ("memorized <= 0.05", "memorized_pixels <= 0.01")
OLD = "clip_score/old >= base * 0.9 at 95%"


def with_old(
    prompts: int, pictures: int, more: int | None = None, rule: str = OLD, name: str = "old"
) -> Recipe:
    """`sdxl` with one rule on so many prompts of one set."""
    chosen = {
        "prompts": [f"prompt {number}" for number in range(prompts)],
        "images_per_prompt": pictures,
    }
    sets = {"new": None, "old": None} | {name: chosen}
    settings = {"evaluate.prompts": sets, "publish.gate": [rule]}
    return load_recipe("sdxl", settings | {"evaluate.max_pictures": more})


def rules_of_recipes() -> Iterator[tuple[str, str]]:
    """Recipe and rule; those with equal rules, rounds and prompts are alike, so one is tried."""
    tried = set()
    for name in recipe_names():
        recipe = load_recipe(name)
        for rule in rules_of(recipe):
            if rule.text in COPIES:
                continue
            rounds = most_rounds(recipe.evaluate)
            shape = rule.text, rounds, simulated._prompts(recipe, rule, rounds)
            if shape not in tried:
                tried.add(shape)
                yield name, rule.text


@pytest.mark.parametrize(("name", "text"), rules_of_recipes())
def test_a_shipped_rule_passes_harmless_models_and_no_bad_ones(name: str, text: str) -> None:
    """By the share of models in docs/internals/evaluation.md; here fewer, with their chance."""
    recipe, rule = load_recipe(name), parse_rule(text)
    chance = 0.03
    assert share([*decisions(recipe, rule, HARMLESS, DRAWS)]) >= 0.95 - chance
    assert share([*decisions(recipe, rule, BAD, DRAWS)]) <= 0.05 + chance
    if rule.level is not None:
        assert share([*decisions(recipe, rule, BORDERLINE, DRAWS)]) <= 0.1 + chance


@pytest.mark.parametrize("words", SPREADS)
def test_the_old_prompts_of_recipes_are_enough_for_all_spreads(words: str) -> None:
    made = [*decisions(load_recipe("sdxl"), parse_rule(OLD), HARMLESS, DRAWS, SPREADS[words])]
    assert share(made) >= 0.95
    assert sum(decision.rounds for decision in made) <= 1.5 * DRAWS  # pictures drawn


@pytest.mark.parametrize("name", recipe_names())
def test_nothing_is_told_of_the_rules_of_shipped_recipes(name: str) -> None:
    recipe = load_recipe(name)
    assert [*undecidable(recipe, {}), *undecidable(recipe, {}, held_out=simulated.HELD_OUT)] == []


@pytest.mark.parametrize(
    ("prompts", "pictures", "rounds"), [(5, 2, 1), (5, 8, 1), (8, 1, 1), (8, 2, 1), (8, 2, 3)]
)
def test_the_probability_is_the_share_of_simulated_models(
    prompts: int, pictures: int, rounds: int
) -> None:
    """With several looks it is a lower bound: a model may also pass at another look."""
    recipe = with_old(prompts, pictures, prompts * pictures * rounds)
    rule = parse_rule(OLD)
    difference = difference_of(rule, {})
    assert difference is not None
    told = probability(rule, difference, looks_of(rule, recipe.evaluate, rounds), 1)
    passed = share([*decisions(recipe, rule, HARMLESS, 400)])
    assert told - 0.05 < passed < told + (0.05 if rounds == 1 else 0.12)


def test_an_undecidable_rule_is_told_with_numbers_that_are_enough() -> None:
    (line,) = undecidable(with_old(5, 2), {})
    assert line == (
        f"gate rule {OLD!r}: a model that lost a tenth of what the rule allows would pass in about "
        "66% of its runs, with 10 pictures of 5 prompts: list 9 prompts in evaluate.prompts.old, "
        "with as many pictures of each"
    )
    (line,) = undecidable(with_old(5, 2, 40), {})
    assert "pass in at least 48% of its runs, with 40 pictures of 5 prompts" in line, (
        "by the levels of looks"
    )
    assert [*undecidable(with_old(8, 2), {})] != [] and [*undecidable(with_old(9, 2), {})] == []


def test_more_rounds_are_advised_where_they_bring_more_prompts() -> None:
    recipe = with_old(30, 1)
    old = recipe.evaluate.prompts["old"].model_copy(update={"prompts_per_round": 6})
    few = recipe.evaluate.model_copy(update={"prompts": {"old": old}})
    (line,) = undecidable(recipe.model_copy(update={"evaluate": few}), {})
    advised = int(line.rpartition("set evaluate.max_pictures to ")[2])
    assert advised % 6 == 0
    for pictures, told in ((advised - 6, 1), (advised, 0)):
        more = few.model_copy(update={"max_pictures": pictures})
        assert len([*undecidable(recipe.model_copy(update={"evaluate": more}), {})]) == told


@pytest.mark.parametrize(
    ("rule", "held_out", "told"),
    [
        ("holdout_loss < base at 95%", 8, "gained 2% .* 8 held-out pictures: hold back 16 "),
        ("holdout_loss < base at 95%", 16, None),
        ("holdout_loss <= champion * 1.02 at 95%", 8, "lost a tenth .* hold back 21 "),
        ("holdout_loss < base", 8, None),
        (OLD, 8, None),  # of drawn pictures
    ],
)
def test_few_held_out_pictures_are_told_by_their_number(
    rule: str, held_out: int, told: str | None
) -> None:
    lines = [*undecidable(with_old(16, 1, rule=rule), {}, held_out=held_out)]
    assert len(lines) == (told is not None)
    assert re.search(told or "", "".join(lines))


def test_a_rule_that_no_prior_tells_of_is_passed_over() -> None:
    for rule in (
        "precision > base at 95%",
        "clip_score/old > base at 95%",
        "clip_score/old > 99 at 95%",
    ):
        assert [*undecidable(with_old(5, 1, rule=rule), {})] == []


@pytest.mark.parametrize("rule", ["cmmd < base at 95%", "cmmd@sibling < base at 95%"])
def test_distances_have_a_prior(rule: str) -> None:
    (line,) = undecidable(with_old(5, 1, rule=rule, name="new"), {})
    assert "a model that gained 50% would pass in about" in line
    assert [*undecidable(with_old(8, 1, rule=rule, name="new"), {})] == []


def evaluated(store: Store, recipe: Recipe, lost: float, day: int, gained: float = 0.0) -> None:
    """Store an evaluation of 20 old prompts, whose loss differs by `lost` between prompts."""
    rng = np.random.default_rng(day)
    base = rng.normal(60, 2, 20)
    resampling = Resampling(1000, 0)
    models = {
        name: {"clip_score/old": mean(scores, resampling)}
        for name, scores in (("base", base), ("tuned", base + rng.normal(gained, lost, 20)))
    }
    draft = store.draft(KeyParts("evaluate", 1, {"day": day}, {}))
    draft.write(METRICS, json.dumps({"metrics": metrics_by_name(models)}).encode())
    draft.write(BOOTSTRAP, to_npz(models))
    summary = {"measured_by": measured_by(recipe)}
    draft.commit(summary, {"created": f"2026-11-{day:02}T00:00:00+00:00"})


def test_the_newest_evaluation_of_the_base_replaces_the_prior(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    recipe = with_old(5, 1)

    def told(recipe: Recipe = recipe) -> str:
        return "".join(undecidable(recipe, newest_estimates(recipe, store)))

    by_prior = told()
    assert "list 13 prompts" in by_prior
    evaluated(store, recipe, 1.0, 1)
    assert told() == ""
    evaluated(store, recipe, 6.0, 2)
    assert "list 20 prompts" in told()
    other = recipe.model.model_copy(update={"path": "another/model"})
    assert told(recipe.model_copy(update={"model": other})) == by_prior


def test_a_damaged_evaluation_does_not_end_a_run(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    rule = "holdout_loss < base at 95%"
    recipe = with_old(5, 1, rule=rule).model_copy(update={"store": store.url})
    evaluated(store, recipe, 1.0, 1)
    (file,) = Path(store.root).glob(f"evaluate/*/{BOOTSTRAP}")
    file.write_bytes(bytes(file.stat().st_size))
    assert newest_estimates(recipe, store) == {}
    held_out = ShardRef("", 0, "", {"holdout/64x64": 9})
    check_gate_rules(recipe, Latents({}, [held_out]))


def test_evaluations_are_read_for_rules_with_a_level_alone(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    recipe = with_old(5, 1, rule="clip_score/old > base")
    evaluated(store, recipe, 1.0, 1)
    assert newest_estimates(recipe, store) == {}


def test_a_rule_without_a_prior_is_told_of_by_an_evaluation(tmp_path: Path) -> None:
    """Of a model that gained what the last one did."""
    store = Store(str(tmp_path / "store"))
    recipe = with_old(5, 1, rule="clip_score/old > base at 95%")
    assert [*undecidable(recipe, {})] == []
    evaluated(store, recipe, 6.0, 1, gained=4.0)
    assert "a model that gained what the last one did" in "".join(
        undecidable(recipe, newest_estimates(recipe, store))
    )


def test_a_plan_tells_it_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("flows.show_plan.open_configs", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        show_plan(with_old(5, 2), None, "24GB", search=False, as_json=False)
    assert "with 10 pictures of 5 prompts" in caplog.text
    with pytest.raises(Refused, match=r"12\.7 standard errors wide with 2 prompts"):
        show_plan(with_old(2, 4), None, "24GB", search=False, as_json=False)


def test_the_bench_has_a_row_for_recipes_with_equal_rules(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["flux-lora", "flux-schnell", "digits-base"]
    assert simulated.main(["--recipes", *names, "--draws", "2"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert len(figures) == 12
    row = figures[f"{OLD}: flux-lora, flux-schnell"]
    assert row["harmless, least"] == 1.0 and row["bad, most"] == 0.0


@pytest.mark.parametrize("name", recipe_names())
def test_the_page_of_gate_power_has_each_rule_of_each_recipe(name: str) -> None:
    lines = (CHECKOUT / "docs/internals/evaluation.md").read_text(encoding="utf-8").splitlines()
    for rule in rules_of(load_recipe(name)):
        if rule.text in COPIES:
            continue
        of_rule = [line for line in lines if line.startswith(f"| `{rule.text}` |")]
        (row,) = [line for line in of_rule if f"`{name}`" in line]
        harmless, borderline, bad, rounds = map(float, row.split("|")[3:7])
        assert harmless >= 0.95 and bad <= 0.05 and rounds <= 1.5
        assert borderline <= (1.0 if rule.level is None else 0.1)
