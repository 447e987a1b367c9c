"""How many prompts and pictures decide a rule of the gate, told before a run.

A rule with a level passes with its whole interval. A model that keeps its quality passes with the
probability of Student's noncentral t: the distance between the model's value and the bound, in
standard errors of the paired difference (Cohen 1988, ch. 2). The difference varies between prompts
and between the pictures of a prompt. Both are read from the newest evaluation of the same base; a
score that was not measured yet has a prior.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple

from artifacts.store import Store
from configs.settings.evaluate import Evaluate
from configs.settings.recipe import Recipe
from configs.settings.train_parts import HOLDOUT_LOSS
from tasks.build_or_reuse import recent_artifacts
from tasks.evaluate.distances import (
    DISTANCES,
    INCEPTION_DISTANCES,
    LEVEL,
    Estimates,
    quantile,
    squared_error,
)
from tasks.evaluate.draw import STAGE
from tasks.evaluate.metrics import (
    CLIP_SCORE,
    CMMD,
    SIMILARITIES,
    all_prompts,
    kind_of,
    most_rounds,
    prompt_rounds,
    prompt_sets,
    sets_of_metric,
)
from tasks.evaluate.stage import measured_by, read_estimates
from tasks.publish.promotion_gate import LEAST_PROMPTS, Rule, at_look, is_of_drawn, parse_rule

#: A rule is decidable if this share of the runs of a harmless model passes it.
ENOUGH = 0.95
#: The harmless model lost this share of what a rule allows.
HARMLESS = 0.1
#: Where a rule allows no loss, a harmless model gained this share of the base's value, if no
#: evaluation says what models gain.
GAINS = {HOLDOUT_LOSS: 0.02} | dict.fromkeys(SIMILARITIES, 0.1)
GAINS |= dict.fromkeys((CMMD, *DISTANCES, *INCEPTION_DISTANCES), 0.5)
MOST_PROMPTS = 1000
MOST_ROUNDS = 8  # later looks have levels that few prompts never reach


@dataclass(frozen=True)
class Spread:
    """A score's mean and its standard deviations."""

    level: float
    prompts: float  # between prompts, alike in both models
    pictures: float  # between pictures of a prompt, alike in both models
    models: float  # between two models' pictures of the same noise
    lost: float = 0.0  # between prompts, of what the tuned model lost

    def variances(self, factor: float) -> tuple[float, float]:
        """The variances of tuned - factor * other, between prompts and between their pictures."""
        shared = (1.0 - factor) ** 2
        between = shared * self.prompts**2 + self.lost**2
        return between, shared * self.pictures**2 + self.models**2


#: CLIP scores of Stable Diffusion 1.5 by CLIP ViT-L/14, five COCO captions of 25 pictures each:
#: logs of github.com/wellzline/ProTIP (f2fc477c). Their `models`, a correlation of a half, and
#: `lost` are assumptions, and so are held-out losses, whose units are pictures, distances, and
#: cosines of edits.
PRIORS = {
    CLIP_SCORE: Spread(27.4, 2.2, 2.0, 2.0, 1.0),
    HOLDOUT_LOSS: Spread(1.0, 0.4, 0.0, 0.02),
    **dict.fromkeys((CMMD, "fd", "kid", *INCEPTION_DISTANCES), Spread(1.0, 0.0, 0.0, 0.0, 0.25)),
    **dict.fromkeys(SIMILARITIES, Spread(0.7, 0.1, 0.05, 0.05, 0.05)),
}


class Look(NamedTuple):
    """What a rule is judged on."""

    prompts: int  # or held-out pictures
    pictures: int


@dataclass(frozen=True)
class Difference:
    """The distance of a harmless model's value from the bound, and what it varies by."""

    model: str  # the harmless model, in words
    gap: float
    between: float  # variance between prompts
    within: float  # variance between the pictures of a prompt

    def passes(self, level: float, look: Look) -> float:
        """The probability that the whole interval is on the right side of the bound."""
        from scipy.special import nctdtr  # half a second to import

        units = look.prompts
        variance = self.between / units + self.within / look.pictures
        if units == 1:  # the interval is of its pictures
            units = look.pictures
            variance = self.within / units
        if units == 1:
            return 0.0
        return 1.0 - float(nctdtr(units - 1, self.gap / variance**0.5, quantile(level, units)))


def undecidable(
    recipe: Recipe, evaluated: Mapping[str, Estimates], held_out: int | None = None
) -> Iterator[str]:
    """Yield a line for each rule with a level that too few runs of a harmless model pass.

    Args:
        evaluated: of the base, by `newest_estimates`; its spread replaces the priors.
        held_out: number of held-out pictures; the rules are then those of held-out losses. None:
            those of drawn pictures.

    Raises:
        Refused: a prompt file cannot be read.
    """
    for rule in map(parse_rule, recipe.publish.gate):
        if rule.level is None or is_of_drawn(rule) != (held_out is None):
            continue
        difference = difference_of(rule, evaluated)
        if difference is None:
            continue
        if held_out is None:
            words = _of_drawn(rule, difference, recipe.evaluate)
        else:
            words = _of_held_out(rule, difference, min(held_out, recipe.evaluate.holdout_samples))
        if words is not None:
            yield f"gate rule {rule.text!r}: {words}"


def difference_of(rule: Rule, evaluated: Mapping[str, Estimates]) -> Difference | None:
    """The difference of a rule, measured or by a prior; None if neither tells it.

    Args:
        evaluated: as in `undecidable`.
    """
    name = kind_of(rule.metric)
    factor = 0.0 if rule.number is not None else rule.factor
    offset = rule.offset if rule.number is None else rule.number
    sign = 1.0 if rule.op.startswith(">") else -1.0
    prior = PRIORS.get(name)
    value, between, within = math.nan, 1.0, 0.0
    if prior is not None:
        value, (between, within) = prior.level, prior.variances(factor)
    share = GAINS.get(name, 0.0)
    words, gained = f"gained {share:.0%}", share * value
    tuned, base = (evaluated.get(model, {}).get(rule.metric) for model in ("tuned", "base"))
    if tuned is not None and base is not None and base.n > 1:
        value, units = base.value, base.prompts or base.n
        measured = squared_error(tuned, base, factor) * units
        scale = measured / (between + within * units / base.n)
        between, within = between * scale, within * scale
        words, gained = "gained what the last one did", sign * (tuned.value - value)
    allowed = sign * (value - factor * value - offset)  # to lose
    gap = gained + allowed
    if allowed > 0:
        words, gap = "lost a tenth of what the rule allows", (1.0 - HARMLESS) * allowed
    return Difference(words, gap, between, within) if gap > 0 and between + within > 0 else None


def newest_estimates(recipe: Recipe, store: Store) -> Mapping[str, Estimates]:
    """The metrics of the newest evaluation of the recipe's base by the same models.

    {} without a readable one among the recent evaluations, or if no rule has a level.
    """
    if all(parse_rule(text).level is None for text in recipe.publish.gate):
        return {}
    wanted = measured_by(recipe)
    with suppress(Exception):  # of an empty store or an unreadable one: a warning has priors
        recent = filter(None, recent_artifacts(store, STAGE))
        alike = (one for one in recent if one.summary.get("measured_by") == wanted)
        newest = store.load(STAGE, next(alike).key)
        return {} if newest is None else read_estimates(newest)
    return {}


def looks_of(rule: Rule, settings: Evaluate, rounds: int) -> list[Look]:
    """What a rule of drawn pictures is judged on after each round."""
    chosen = sets_of_metric(rule.metric, settings)
    drawn = [all_prompts({n: sets[n] for n in chosen}) for sets in prompt_rounds(settings, rounds)]
    return [Look(len(set(prompts)), len(prompts)) for prompts in accumulate(drawn)]


def probability(rule: Rule, difference: Difference, looks: Sequence[Look], first: int = 0) -> float:
    """The probability that a harmless model passes at the best of the looks, and so at least.

    Args:
        first: number of the first look; 0: it is the only one.
    """
    judged = [(at_look(rule, number), look) for number, look in enumerate(looks, first)]
    return max(difference.passes(at.level or LEVEL, look) for at, look in judged)


def _of_drawn(rule: Rule, difference: Difference, settings: Evaluate) -> str | None:
    """How decidable a rule is, and what to do; None if enough models pass."""

    def chance(looks: Sequence[Look]) -> float:
        is_only = settings.max_pictures is None and len(looks) == 1
        return probability(rule, difference, looks, 0 if is_only else 1)

    rounds = most_rounds(settings)
    looks = looks_of(rule, settings, rounds)
    is_refused = looks[-1].prompts != 1 and looks[-1].prompts < LEAST_PROMPTS
    if is_refused or chance(looks) >= ENOUGH:
        return None
    named = " and ".join(f"evaluate.prompts.{n}" for n in sets_of_metric(rule.metric, settings))
    first = looks[0].prompts
    drawn = sum(map(len, prompt_sets(settings).values()))
    counts = range(max(LEAST_PROMPTS, first + 1), MOST_PROMPTS)
    more = range(rounds + 1, 1 + MOST_ROUNDS)
    enough = (n for n in counts if chance([_with_prompts(n / first, k) for k in looks]) >= ENOUGH)
    each = "" if looks[-1].prompts == first else " for each round (prompts_per_round)"
    remedies = [
        f"list {count} prompts{each} in {named}, with as many pictures of each"
        for count in islice(enough, 1)
    ]
    enough = (n for n in more if chance(looks_of(rule, settings, n)) >= ENOUGH)
    remedies += [f"set evaluate.max_pictures to {drawn * n}" for n in islice(enough, 1)]
    what = f"{looks[-1].pictures} pictures of {looks[-1].prompts} prompts"
    share = f"{'about' if len(looks) == 1 else 'at least'} {chance(looks):.0%}"
    return _told(what, difference, share, " or ".join(remedies))


def _with_prompts(factor: float, look: Look) -> Look:
    """The look with more prompts, and as many pictures of each."""
    return Look(round(factor * look.prompts), round(factor * look.pictures))


def _of_held_out(rule: Rule, difference: Difference, pictures: int) -> str | None:
    """As `_of_drawn`, of a held-out loss, which rounds of drawn pictures add nothing to."""

    def chance(count: int) -> float:
        return probability(rule, difference, [Look(count, count)])

    if chance(pictures) >= ENOUGH:
        return None
    counts = range(pictures + 1, MOST_PROMPTS)
    enough = next((count for count in counts if chance(count) >= ENOUGH), None)
    remedy = f"hold back {enough} (encode.holdout, evaluate.holdout_samples)" if enough else ""
    share = f"about {chance(pictures):.0%}"
    return _told(f"{pictures} held-out pictures", difference, share, remedy)


def _told(what: str, difference: Difference, share: str, remedy: str) -> str:
    return (
        f"a model that {difference.model} would pass in {share} of its runs, with {what}: "
        f"{remedy or 'no number of them is enough: change the rule'}"
    )
