"""The rules of the gate, and the errors of invalid ones."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from configs.errors import Refused
from configs.load_recipe import load_recipe
from configs.settings.recipe import Recipe
from tasks.evaluate.distances import Estimate, Resampling, mean, quantile, share
from tasks.publish.promotion_gate import (
    Verdict,
    check_prompts,
    check_rules,
    failure,
    is_undecided,
    judge,
    needs_champion,
    needs_pictures,
    outcome,
    parse_rule,
)


def exactly(value: float) -> Estimate:
    return Estimate(value, 10, np.full(20, value))


VALUES = {
    "base": {"cmmd": exactly(5.0), "digit/new": exactly(0.1)},
    "tuned": {"cmmd": exactly(0.5), "digit/new": exactly(0.93)},
    "champion": {"cmmd": exactly(0.4)},
}


@pytest.mark.parametrize(
    ("rule", "passed"),
    [
        ("digit/new >= 0.93", True),
        ("digit/new > 0.93", False),
        ("cmmd < base", True),
        ("cmmd <= base * 0.1", True),
        ("cmmd < base * 0.1", False),
        ("cmmd <= champion", False),
        ("cmmd <= champion * 1.25", True),
        ("cmmd <= champion + 0.1", True),
        ("cmmd <= CHAMPION - 0.1", False),
        ("digit/new >= champion", True),  # there is none yet
        ("digit/new>=9.3e-1", True),
    ],
)
def test_a_rule_is_evaluated_on_the_values(rule: str, passed: bool) -> None:
    (verdict,) = judge([rule], VALUES)
    assert verdict.passed is passed


@pytest.mark.parametrize("comparison", ["> 0.5", ">= 0.5", "< 0.5", "<= 0.5"])
@pytest.mark.parametrize("level", ["", " at 95%"])
def test_a_value_that_is_no_number_passes_no_rule(comparison: str, level: str) -> None:
    models = {"tuned": {"cmmd": exactly(np.nan)}}
    (verdict,) = judge([f"cmmd {comparison}{level}"], models)
    assert verdict.passed is False


@pytest.mark.parametrize("operator", [">", ">=", "<", "<="])
@pytest.mark.parametrize("other", ["base", "champion"])
def test_a_bound_that_is_no_number_passes_no_rule(operator: str, other: str) -> None:
    models = {"tuned": {"cmmd": exactly(0.5)}, other: {"cmmd": exactly(np.nan)}}
    (verdict,) = judge([f"cmmd {operator} {other}"], models, champion=True)
    assert verdict.passed is False


def test_a_rule_fails_without_a_value_of_the_champion() -> None:
    (verdict,) = judge(["digit/new >= champion"], VALUES, champion=True)
    assert not verdict.passed and "no comparable value" in verdict.note


def test_without_rules_everything_passes() -> None:
    assert judge([], {"tuned": {}}) == []


def test_a_rule_fails_without_a_value_of_the_model() -> None:
    (verdict,) = judge(["fd < 1"], VALUES)
    assert not verdict.passed
    assert "not measured" in verdict.note


@pytest.mark.parametrize(
    "text",
    [
        *("cmmd", "cmmd = 3", "cmmd < tuned", "cmmd < 1 < 2", "cmmd < 1 at 95", ""),
        *("cmmd < 1.2.3", "cmmd < base * .", "cmmd < base at 9.9.5%"),
    ],
)
def test_the_error_of_an_invalid_rule_has_the_syntax(text: str) -> None:
    with pytest.raises(Refused, match="write it as"):
        parse_rule(text)


def test_the_error_of_an_unknown_metric_has_the_nearest_one() -> None:
    with pytest.raises(Refused, match="did you mean cmmd"):
        check_rules(["cmd < 3"], ["cmmd", "fd"], 100)


def test_only_rules_with_champion_need_one() -> None:
    assert needs_champion(["cmmd < base", "fd < champion"])
    assert not needs_champion(["cmmd < base", "fd < 3"])


def test_with_a_level_the_whole_interval_of_the_paired_difference_complies() -> None:
    """The tuned model is better by 0.1; 20 pictures leave the sign open, 2,000 do not."""
    for n, sure in ((20, False), (2000, True)):
        rng = np.random.default_rng(0)
        prompt = rng.normal(size=n)
        champion, tuned = prompt, prompt + rng.normal(0.1, 0.5, n)
        models = {
            "champion": {"clip_score": mean(champion, Resampling(200, 0))},
            "tuned": {"clip_score": mean(tuned, Resampling(200, 0))},
        }
        plain, confident, worse = judge(
            [
                "clip_score > champion",
                "clip_score > champion at 95%",
                "clip_score < champion at 95%",
            ],
            models,
            champion=True,
        )
        assert plain.passed and confident.passed is sure and not worse.passed
        assert confident.interval is not None
        assert (confident.interval[0] > 0) is sure
        (lenient,) = judge(["clip_score >= champion - 1 at 95%"], models, champion=True)
        assert lenient.passed


def test_with_a_level_a_share_is_judged_by_its_interval() -> None:
    """Nine of nine may be luck."""
    for n, passed in ((9, False), (200, True)):
        models = {"tuned": {"digit/new": share(np.ones(n, bool), Resampling(100, 0))}}
        plain, confident = judge(["digit/new >= 0.9", "digit/new >= 0.9 at 95%"], models)
        assert plain.passed and confident.passed is passed


def of_prompts(values: Sequence[float] | NDArray[np.float64]) -> Estimate:
    """The mean of values, one of each prompt."""
    return mean(np.array(values), Resampling(200, 0))


def test_an_interval_that_contains_the_bound_decides_nothing() -> None:
    spread = [28.0, 29.0, 30.0, 29.5, 28.5]
    models = {"tuned": {"clip_score": of_prompts(spread), "fd": of_prompts([9.0, 10.0, 11.0])}}
    rules = [f"clip_score >= {bound} at 95%" for bound in (25, 28.5, 29.3, 35)]
    verdicts = judge([*rules, "fd < 9"], models)
    outcomes = [outcome(verdict) for verdict in verdicts]
    assert outcomes == ["passed", "undecided", "undecided", "failed", "failed"]
    assert not any(verdict.more for verdict in (verdicts[0], verdicts[3]))
    assert is_undecided(verdicts[:3]) and needs_pictures(verdicts[:3])
    assert not is_undecided(verdicts[:1]) and not is_undecided(verdicts)


def test_so_many_more_pictures_decide() -> None:
    """As rounds of all rules' pictures, whose looks have levels of their own."""
    scores = 29 + np.random.default_rng(0).normal(size=60)
    rule = "clip_score >= 28.9 at 95%"

    def judged(rounds: int, look: int, pictures: int = 100) -> Verdict:
        models = {"tuned": {"clip_score": of_prompts(np.tile(scores, rounds))}}
        return judge([rule], models, look=look, pictures=pictures)[0]

    for look in (0, 1):
        verdict = judged(1, look)
        assert verdict.more is not None and verdict.more % 100 == 0
        assert f"about {verdict.more} more pictures" in failure(verdict)
        rounds = 1 + verdict.more // 100
        assert judged(rounds, rounds).passed and judged(rounds // 2, rounds // 2).undecided
    at_bound = f"clip_score >= {scores.mean()} at 95%"
    (near,) = judge([at_bound], {"tuned": {"clip_score": of_prompts(scores)}}, pictures=60)
    assert near.more is None and "the value is too near to the bound" in failure(near)


def test_an_undecided_held_out_loss_takes_held_out_pictures() -> None:
    models = {"tuned": {name: of_prompts([1.0, 2.0, 3.0]) for name in ("holdout_loss", "fd")}}
    loss, distance = judge(["holdout_loss < 2.5 at 95%", "fd < 2.5 at 95%"], models, pictures=60)
    assert (
        loss.more == 68
        and "about 68 more held-out pictures would do (evaluate.holdout_samples)" in failure(loss)
    )
    assert needs_pictures([distance]) and not needs_pictures([distance, loss])


def test_all_looks_together_spend_the_error_of_the_rule() -> None:
    """Their sum is at most the rule's; a held-out loss is looked at once."""
    losses = {
        "holdout_loss": of_prompts([1.0, 2.0, 3.0]),
        "clip_score": of_prompts([1.0, 2.0, 3.0]),
    }
    widths = {}
    for look in (0, 1, 2, 3):
        verdicts = judge([f"{name} < 2 at 90%" for name in losses], {"tuned": losses}, look=look)
        widths[look] = [v.interval[1] - v.interval[0] for v in verdicts if v.interval]
    ratios = [
        quantile(level, 3) / quantile(0.9, 3)
        for level in (0.9, 1 - 0.1 / 2, 1 - 0.1 / 6, 1 - 0.1 / 12)
    ]
    assert [w[1] / widths[0][1] for w in widths.values()] == pytest.approx(ratios)
    assert len({w[0] for w in widths.values()}) == 1
    assert [v.note for v in verdicts] == ["", "look 3, at 99.2%"], "in card and report"


def test_a_metric_of_one_sample_passes_no_rule_with_a_level() -> None:
    models = {
        "base": {"holdout_loss": mean(np.array([0.3]), Resampling(20, 0))},
        "tuned": {"holdout_loss": mean(np.array([0.2]), Resampling(20, 0))},
    }
    plain, confident, bound = judge(
        ["holdout_loss < base", "holdout_loss < base at 95%", "holdout_loss < 1 at 95%"], models
    )
    assert plain.passed and not confident.passed and not bound.passed
    assert confident.undecided and bound.undecided and not needs_pictures([confident, bound])
    assert "no interval: of one sample" in failure(confident)


def test_metrics_of_different_pictures_pass_no_rule_with_a_level() -> None:
    models = {
        "base": {"fd": mean(np.arange(9.0), Resampling(20, 0))},
        "tuned": {"fd": mean(np.arange(8.0), Resampling(20, 0))},
    }
    plain, confident = judge(["fd < base", "fd < base at 95%"], models)
    assert plain.passed and not confident.passed and confident.interval is None
    assert failure(confident) == (
        "fd < base at 95% (measured 3.5, bound 4, no interval: of different pictures)"
    )


@pytest.mark.parametrize(
    ("level", "needed"), [("50", 4), ("90", 20), ("95", 40), ("97.5", 80), ("99.9", 2000)]
)
def test_a_level_needs_a_resample_beyond_each_end_of_its_interval(level: str, needed: int) -> None:
    rule = f"fd < base at {level}%"
    check_rules([rule], ["fd"], needed)
    with pytest.raises(Refused, match=rf"evaluate\.bootstrap of {needed} or more"):
        check_rules([rule], ["fd"], needed - 1)


def test_a_level_is_below_100() -> None:
    with pytest.raises(Refused, match="at least 50%"):
        parse_rule("fd < base at 100%")


def with_old(prompts: int, **settings: Any) -> Recipe:
    """`sdxl` with so many prompts of old knowledge; equal texts are one prompt."""
    texts = [f"prompt {number}" for number in range(prompts)]
    old = {"prompts": [*texts, texts[0]], "images_per_prompt": 20}
    return load_recipe("sdxl", {"evaluate.prompts.old": old, **settings})


@pytest.mark.parametrize(("prompts", "width"), [(2, "12.7"), (4, "3.2"), (5, None)])
def test_a_rule_with_a_level_on_few_prompts_is_refused_with_its_width(
    prompts: int, width: str | None
) -> None:
    recipe = with_old(prompts)
    if width is None:
        assert [*check_prompts(recipe.publish.gate, recipe.evaluate)] == []
        return
    with pytest.raises(Refused, match=rf"± {width} standard errors .* evaluate\.prompts\.old"):
        [*check_prompts(recipe.publish.gate, recipe.evaluate)]


def test_a_rule_on_one_prompt_is_about_its_pictures() -> None:
    recipe = with_old(1)
    (line,) = check_prompts(recipe.publish.gate, recipe.evaluate)
    assert "of the one prompt of evaluate.prompts.old alone" in line


def test_the_prompts_of_later_rounds_count() -> None:
    recipe = with_old(8)
    old = recipe.evaluate.prompts["old"].model_copy(update={"prompts_per_round": 3})
    sets = {**recipe.evaluate.prompts, "old": old}
    pictures = 8 * 8 + 3 * 20
    for most, ends in ((pictures, True), (2 * pictures, False)):
        evaluate = recipe.evaluate.model_copy(update={"prompts": sets, "max_pictures": most})
        with pytest.raises(Refused) if ends else nullcontext():
            assert [*check_prompts(recipe.publish.gate, evaluate)] == []


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        ("cmmd < base at 95%", "evaluate.prompts.new, with"),
        ("clip_score > 20 at 90%", "evaluate.prompts.new and evaluate.prompts.old, with"),
        ("clip_score/old > 20 at 95%", "evaluate.prompts.old, with"),
        ("clip_score/old > 20", None),
        ("holdout_loss < base at 95%", None),  # of held-out pictures
    ],
)
def test_the_prompts_of_a_rule_are_those_of_its_metric(rule: str, settings: str | None) -> None:
    sets = {name: {"prompts": [name, "a fox"]} for name in ("new", "old")}
    few = load_recipe("sdxl", {"evaluate.prompts": sets, "publish.gate": [rule]})
    if settings is None:
        assert [*check_prompts(few.publish.gate, few.evaluate)] == []
        return
    with pytest.raises(Refused, match=f"list 5 or more in {settings}"):
        [*check_prompts(few.publish.gate, few.evaluate)]
