"""The gate: rules over evaluation metrics that a model must pass before it is published."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: metric name -> model ("base", "tuned", "champion") -> value
Values = Mapping[str, Mapping[str, float]]

#: Groups: metric, operator, number, model, adjustment, amount.
_RULE = re.compile(
    r"\s*([A-Za-z_][\w/.-]*)\s*(>=|<=|>|<)\s*"
    r"(?:([-+]?[\d.]+(?:e[-+]?\d+)?)"
    r"|(base|champion)(?:\s*([*+-])\s*([\d.]+(?:e[-+]?\d+)?))?)\s*",
    re.IGNORECASE,
)
_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_ADJUST = {"*": operator.mul, "+": operator.add, "-": operator.sub}


class GateError(ValueError):
    """A rule cannot be parsed, or its metric is not measured."""


@dataclass(frozen=True)
class Rule:
    """`metric op bound`. The bound is a number, or another model's value with an adjustment."""

    text: str
    metric: str
    op: str  # >= | <= | > | <
    number: float | None
    model: str | None  # base | champion
    how: str | None  # * | + | -
    by: float


@dataclass(frozen=True)
class Verdict:
    """The result of one rule."""

    rule: str
    passed: bool
    value: float | None  # of the tuned model; None if it was not measured
    bound: float | None  # None if the other model has no comparable value
    note: str = ""


def parse_rule(text: str) -> Rule:
    """Parse a rule: `digit/new >= 0.9`, `cmmd < base` or `clip_score >= champion * 0.98`.

    Raises:
        GateError: the text is no rule.
    """
    match = _RULE.fullmatch(text)
    if match is None:
        raise GateError(
            f"gate rule {text!r}: write it as `metric >= number`, `metric < base` or "
            "`metric >= champion * 0.98`"
        )
    metric, op, number, model, how, by = match.groups()
    bound = None if number is None else float(number)
    return Rule(text, metric, op, bound, model and model.lower(), how, float(by or 0))


def check_rules(rules: Sequence[str], metrics: Sequence[str], hint: str | None = None) -> None:
    """Raise GateError for the first rule that cannot be parsed or has an unknown metric.

    Args:
        metrics: names of the measured metrics.
        hint: reason and remedy of a missing metric; default: the most similar names.
    """
    for text in rules:
        rule = parse_rule(text)
        if rule.metric not in metrics:
            near = difflib.get_close_matches(rule.metric, metrics, n=1)
            known = f"did you mean {near[0]}?" if near else f"there are: {', '.join(metrics)}"
            raise GateError(f"gate rule {text!r}: {rule.metric} is not measured ({hint or known})")


def needs_champion(rules: Sequence[str]) -> bool:
    """Whether a rule compares with the current champion."""
    return any(parse_rule(text).model == "champion" for text in rules)


def judge(rules: Sequence[str], values: Values, *, champion: bool = False) -> list[Verdict]:
    """One verdict per rule on the tuned model's values.

    Args:
        champion: whether a champion exists. Without one, rules against it pass. With one, they
            fail if the champion has no comparable value.
    """
    return [_judge_one(parse_rule(text), values, champion) for text in rules]


def _judge_one(rule: Rule, values: Values, champion: bool) -> Verdict:
    found = values.get(rule.metric, {})
    value = found.get("tuned")
    if value is None:
        return Verdict(rule.text, False, None, None, f"{rule.metric} was not measured")
    bound = rule.number if rule.model is None else found.get(rule.model)
    if bound is None:
        passed = rule.model == "champion" and not champion
        note = "no champion yet" if passed else f"the {rule.model} has no comparable value"
        return Verdict(rule.text, passed, value, None, note)
    if rule.how is not None:
        bound = _ADJUST[rule.how](bound, rule.by)
    return Verdict(rule.text, bool(_COMPARE[rule.op](value, bound)), value, bound)


def as_rows(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Table rows, one per verdict."""
    return [
        {
            "rule": v.rule,
            "value": "—" if v.value is None else v.value,
            "bound": "—" if v.bound is None else v.bound,
            "verdict": ("passed" if v.passed else "failed") + (f" ({v.note})" if v.note else ""),
        }
        for v in verdicts
    ]
