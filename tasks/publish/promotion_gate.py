"""The gate: rules over evaluation metrics that a model must pass before it is published."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.errors import Refused
from configs.settings.evaluate import Evaluate
from configs.settings.train_parts import HOLDOUT_LOSS
from tasks.evaluate.distances import LEVEL, Estimate, Estimates, Interval, difference, quantile
from tasks.evaluate.metrics import hint_of_metric, most_rounds, prompt_rounds, sets_of_metric
from tasks.panels import human

#: Model ("base", "tuned", "champion") -> its metrics.
Models = Mapping[str, Estimates]

#: Groups: metric, operator, number, model, adjustment, amount, level.
_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d{1,3})?"
_RULE = re.compile(
    r"\s*([A-Za-z_][\w/.-]*(?:@sibling)?)\s*(>=|<=|>|<)\s*"
    rf"(?:([-+]?{_NUMBER})"
    rf"|(base|champion)(?:\s*([*+-])\s*({_NUMBER}))?)"
    rf"(?:\s+at\s+({_NUMBER})\s*%)?\s*",
    re.IGNORECASE,
)
_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
#: With fewer prompts, an interval at 95% is wider than ± 2.8 standard errors.
LEAST_PROMPTS = 5
ONE_SAMPLE = "no interval: of one sample"
ENOUGH_PROMPTS = 8
#: Intervals of later looks are hardly narrower, since their levels rise.
MOST_ROUNDS = 32


@dataclass(frozen=True)
class Rule:
    """`metric op bound`. The bound is a number, or factor * another model's value + offset.

    With a level, the whole confidence interval of the difference to the bound must comply.
    """

    text: str
    metric: str
    op: str  # >= | <= | > | <
    number: float | None
    model: str | None  # base | champion
    factor: float
    offset: float
    level: float | None  # of confidence, 0.5 to 1


@dataclass(frozen=True)
class Verdict:
    """The result of one rule."""

    rule: str
    passed: bool
    value: float | None  # of the tuned model; None if it was not measured
    bound: float | None  # None if the other model has no comparable value
    note: str = ""
    #: The interval of value - bound, at the rule's level or 95%; None if it is not known.
    interval: tuple[float, float] | None = None
    undecided: bool = False  # the interval contains the bound, or is not known of one prompt
    #: More pictures per model, or held-out ones, that would decide by the width of the interval.
    more: int | None = None


def parse_rule(text: str) -> Rule:
    """Parse a rule: `cmmd < base`, `clip_score >= champion * 0.98`, `kid < champion at 95%`.

    Raises:
        Refused: the text is no rule.
    """
    match = _RULE.fullmatch(text)
    if match is None:
        raise Refused(
            f"gate rule {text!r}: write it as `metric >= number`, `metric < base` or "
            "`metric >= champion * 0.98`, with ` at 95%` for confidence"
        )
    metric, op, number, model, how, by, percent = match.groups()
    bound = None if number is None else float(number)
    amount = float(by or 0)
    factor, offset = (amount, 0.0) if how == "*" else (1.0, -amount if how == "-" else amount)
    level = None if percent is None else float(percent) / 100
    if level is not None and not 0.5 <= level < 1:
        raise Refused(f"gate rule {text!r}: a level is at least 50% and below 100%")
    return Rule(text, metric, op, bound, model and model.lower(), factor, offset, level)


def check_rules(
    rules: Sequence[str], metrics: Sequence[str], resamples: int, hint: str | None = None
) -> None:
    """Raise Refused for the first rule that cannot be parsed or measured.

    Args:
        metrics: names of the measured metrics.
        resamples: of the bootstrap; a level needs a resample beyond each end of its interval.
        hint: reason and remedy of a missing metric; default: the most similar names.
    """
    for text in rules:
        rule = parse_rule(text)
        # 0.999 is no binary fraction.
        needed = 0 if rule.level is None else math.ceil(2 / (1 - rule.level) - 1e-9)
        if resamples < needed:
            raise Refused(f"gate rule {text!r}: it needs evaluate.bootstrap of {needed} or more")
        if rule.metric not in metrics:
            hint = hint or hint_of_metric(rule.metric, metrics)
            raise Refused(f"gate rule {text!r}: {rule.metric} is not measured ({hint})")


def check_prompts(gate: Sequence[str], settings: Evaluate) -> Iterator[str]:
    """Yield a line for each rule with a level that is about one prompt alone.

    Pictures are then the unit of its interval. With two to four prompts, prompts are: Student's t
    makes it too wide to pass.

    Raises:
        Refused: a rule with a level has two to four prompts, or a prompt file cannot be read.
    """
    rules = [rule for rule in map(parse_rule, gate) if rule.level is not None]
    rounds = prompt_rounds(settings, most_rounds(settings)) if rules else ()
    for rule in rules:
        chosen = sets_of_metric(rule.metric, settings)
        count = len({prompt for sets in rounds for name in chosen for prompt in sets[name]})
        named = " and ".join(f"evaluate.prompts.{name}" for name in chosen)
        if count == 1:
            yield f"gate rule {rule.text!r}: its interval is of the one prompt of {named} alone"
        elif 1 < count < LEAST_PROMPTS:
            level = rule.level or LEVEL
            raise Refused(
                f"gate rule {rule.text!r}: its interval is ± {quantile(level, count):.1f} standard "
                f"errors wide with {count} prompts (± {quantile(level, ENOUGH_PROMPTS):.1f} with "
                f"{ENOUGH_PROMPTS}): list {LEAST_PROMPTS} or more in {named}, with fewer "
                "images_per_prompt"
            )


def needs_champion(rules: Sequence[str]) -> bool:
    """Whether a rule compares with the current champion."""
    return any(parse_rule(text).model == "champion" for text in rules)


def judge(
    rules: Sequence[str],
    models: Models,
    *,
    champion: bool = False,
    look: int = 0,
    pictures: int | None = None,
) -> list[Verdict]:
    """One verdict per rule on the tuned model's metrics.

    Args:
        champion: whether a champion exists. If not, rules against it pass. If so, they
            fail if the champion has no comparable value.
        look: number (from 1) of this look at a growing number of pictures; 0: the only look.
        pictures: per model in a round, of all rules; None: not known.
    """
    return [_judge_one(parse_rule(text), models, champion, look, pictures) for text in rules]


def is_of_drawn(rule: Rule) -> bool:
    """Whether a rule's metric is of drawn pictures, which further rounds add to."""
    return rule.metric.partition("/")[0] != HOLDOUT_LOSS


def at_look(rule: Rule, look: int) -> Rule:
    """The rule with the level of one of several looks; 0 is the only one.

    Look k spends 1 / (k (k + 1)) of the error. The sum over all looks is at most the rule's own
    error (Bonferroni's inequality), however many looks follow and whatever decides on them.
    """
    if rule.level is None or look == 0:
        return rule
    return replace(rule, level=1 - (1 - rule.level) / (look * (look + 1)))


def is_undecided(verdicts: Sequence[Verdict]) -> bool:
    """Whether a rule is undecided, and none failed."""
    refusing = [verdict for verdict in verdicts if not verdict.passed]
    return bool(refusing) and all(verdict.undecided for verdict in refusing)


def needs_pictures(verdicts: Sequence[Verdict]) -> bool:
    """Whether more drawn pictures may let an undecided model pass."""
    undecided = [parse_rule(verdict.rule) for verdict in verdicts if verdict.undecided]
    return is_undecided(verdicts) and all(map(is_of_drawn, undecided))


def _judge_one(
    rule: Rule, models: Models, champion: bool, look: int, pictures: int | None
) -> Verdict:
    tuned = models["tuned"].get(rule.metric)
    if tuned is None:
        return Verdict(rule.text, False, None, None, f"{rule.metric} was not measured")
    other = None if rule.model is None else models.get(rule.model, {}).get(rule.metric)
    if rule.number is None and other is None:
        passed = rule.model == "champion" and not champion
        note = "no champion yet" if passed else f"the {rule.model} has no comparable value"
        return Verdict(rule.text, passed, tuned.value, None, note)
    bound = rule.number if other is None else rule.factor * other.value + rule.offset
    assert bound is not None
    judged = at_look(rule, look) if is_of_drawn(rule) else rule
    interval, why = _interval(judged, tuned, other)
    compare = _COMPARE[rule.op]
    if rule.level is None:
        passed = bool(compare(tuned.value, bound))
        return Verdict(rule.text, passed, tuned.value, bound, "", interval)
    if interval is None:
        is_open = why == ONE_SAMPLE and math.isfinite(tuned.value) and math.isfinite(bound)
        return Verdict(rule.text, False, tuned.value, bound, why, undecided=is_open)
    ends = {bool(compare(end, 0.0)) for end in interval}
    note = "" if judged == rule else f"look {look}, at {judged.level:.1%}"
    more = None
    if len(ends) > 1 and not is_of_drawn(rule):
        more = _more_held_out(tuned, bound, interval)
    elif len(ends) > 1 and pictures is not None:
        more = _more_rounds(rule, look, tuned, bound, interval) * pictures or None
    return Verdict(
        rule.text, ends == {True}, tuned.value, bound, note, interval, len(ends) > 1, more
    )


def _more_held_out(tuned: Estimate, bound: float, interval: Interval) -> int | None:
    """Held-out pictures until the interval would end at the bound; its width falls as 1 / sqrt(n).

    None if the value is so near to the bound that it takes over 100 times the pictures.
    """
    low, high = interval
    gap = abs(tuned.value - bound)
    if gap * 20 < high - low:
        return None
    return max(1, math.ceil(tuned.n * ((high - low) / 2 / gap) ** 2) - tuned.n)


def _more_rounds(rule: Rule, look: int, tuned: Estimate, bound: float, interval: Interval) -> int:
    """Rounds until the interval, at the level of that look, would end at the bound.

    0 if the value is so near to the bound that no number of them is enough. The width falls as
    1 / sqrt(n), as it does if each round has new prompts.
    """
    low, high = interval
    gap = abs(tuned.value - bound)
    level = at_look(rule, look).level or LEVEL
    drawn = max(look, 1)
    for rounds in range(drawn + 1, MOST_ROUNDS):
        later = at_look(rule, rounds).level or LEVEL
        wider = quantile(later, tuned.units) / quantile(level, tuned.units)
        if (high - low) / 2 * wider * (drawn / rounds) ** 0.5 <= gap:
            return rounds - drawn
    return 0


def _interval(rule: Rule, tuned: Estimate, other: Estimate | None) -> tuple[Interval | None, str]:
    """The interval of value - bound; or None, and why there is none."""
    level = rule.level or LEVEL
    if other is None:
        low, high = tuned.interval(level)
        interval = low - (rule.number or 0.0), high - (rule.number or 0.0)
    else:
        try:
            interval = difference(tuned, other, factor=rule.factor, offset=rule.offset, level=level)
        except ValueError:
            return None, "no interval: of different pictures"
    if all(map(math.isfinite, interval)):
        return interval, ""
    return None, ONE_SAMPLE


def as_rows(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Table rows, one per verdict."""
    return [
        {
            "rule": v.rule,
            "value": "—" if v.value is None else v.value,
            "bound": "—" if v.bound is None else v.bound,
            "value - bound": "—" if v.interval is None else _shown(v.interval),
            "verdict": outcome(v) + (f" ({v.note})" if v.note else ""),
        }
        for v in verdicts
    ]


def outcome(verdict: Verdict) -> str:
    """`passed`, `failed` or `undecided`."""
    return "passed" if verdict.passed else "undecided" if verdict.undecided else "failed"


def failure(verdict: Verdict) -> str:
    """The rule and the numbers that failed it; with a level, the interval that decided."""
    if verdict.value is None or verdict.bound is None:
        return f"{verdict.rule} ({verdict.note})"
    decided = ""
    if parse_rule(verdict.rule).level is not None:
        ends = verdict.interval
        decided = f", {verdict.note}" if ends is None else f", value - bound in {_shown(ends)}"
    if verdict.more is not None:
        kind, setting = "held-out pictures", "evaluate.holdout_samples"
        if is_of_drawn(parse_rule(verdict.rule)):
            kind, setting = "pictures", "evaluate.max_pictures"
        decided += f": about {verdict.more:,} more {kind} would do ({setting})"
    elif verdict.undecided and verdict.interval is not None:
        decided += ": the value is too near to the bound"
    return f"{verdict.rule} (measured {verdict.value:.4g}, bound {verdict.bound:.4g}{decided})"


def _shown(interval: Sequence[float]) -> str:
    low, high = interval
    return f"[{human(float(low))}, {human(float(high))}]"
