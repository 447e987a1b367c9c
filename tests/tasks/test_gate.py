"""The rules of the gate, and the errors of invalid ones."""

import pytest

from tasks.publish.gate import GateError, check_rules, judge, needs_champion, parse_rule

VALUES = {
    "cmmd": {"base": 5.0, "tuned": 0.5, "champion": 0.4},
    "digit/new": {"base": 0.1, "tuned": 0.93},
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


def test_a_rule_fails_without_a_value_of_the_champion() -> None:
    (verdict,) = judge(["digit/new >= champion"], VALUES, champion=True)
    assert not verdict.passed and "no comparable value" in verdict.note


def test_without_rules_everything_passes() -> None:
    assert judge([], {}) == []


def test_a_rule_fails_without_a_value_of_the_model() -> None:
    (verdict,) = judge(["fd < 1"], VALUES)
    assert not verdict.passed
    assert "not measured" in verdict.note


@pytest.mark.parametrize("text", ["cmmd", "cmmd = 3", "cmmd < tuned", "cmmd < 1 < 2", ""])
def test_the_error_of_an_invalid_rule_has_the_syntax(text: str) -> None:
    with pytest.raises(GateError, match="write it as"):
        parse_rule(text)


def test_the_error_of_an_unknown_metric_has_the_nearest_one() -> None:
    with pytest.raises(GateError, match="did you mean cmmd"):
        check_rules(["cmd < 3"], ["cmmd", "fd"])


def test_only_rules_with_champion_need_one() -> None:
    assert needs_champion(["cmmd < base", "fd < champion"])
    assert not needs_champion(["cmmd < base", "fd < 3"])
