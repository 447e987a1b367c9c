"""Rules decide; what they cannot decide on is said."""

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
def test_a_rule_is_held_against_the_values(rule: str, passed: bool) -> None:
    (verdict,) = judge([rule], VALUES)
    assert verdict.passed is passed


def test_what_the_champion_has_no_value_of_does_not_pass() -> None:
    (verdict,) = judge(["digit/new >= champion"], VALUES, champion=True)
    assert not verdict.passed and "no comparable value" in verdict.note


def test_no_rules_let_everything_pass() -> None:
    assert judge([], {}) == []


def test_what_was_not_measured_does_not_pass() -> None:
    (verdict,) = judge(["fd < 1"], VALUES)
    assert not verdict.passed
    assert "not measured" in verdict.note


@pytest.mark.parametrize("text", ["cmmd", "cmmd = 3", "cmmd < tuned", "cmmd < 1 < 2", ""])
def test_a_rule_that_cannot_be_read_says_how_to_write_one(text: str) -> None:
    with pytest.raises(GateError, match="write it as"):
        parse_rule(text)


def test_a_rule_on_an_unknown_metric_names_the_nearest() -> None:
    with pytest.raises(GateError, match="did you mean cmmd"):
        check_rules(["cmd < 3"], ["cmmd", "fd"])


def test_only_rules_with_champion_need_one() -> None:
    assert needs_champion(["cmmd < base", "fd < champion"])
    assert not needs_champion(["cmmd < base", "fd < 3"])
