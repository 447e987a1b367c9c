"""How often every rule of every shipped recipe passes good, borderline and bad models.

    python -m bench.gate_power

Scores of pictures, held-out losses and features of 1,000 models are simulated. The gate's own
estimators and rules judge them, at each look at a growing number of pictures. A harmless model lost
a tenth of what a rule allows, a borderline one all of it, a bad one twice as much. Where a rule
allows no loss, the harmless model gained something (`GAINS`), and the others nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.report import Row, finish, log, option_parser
from configs.load_recipe import load_recipe, recipe_names
from configs.settings.recipe import Recipe
from tasks.evaluate import distances
from tasks.evaluate.distances import Estimate, Float64, Prompts, Resampling, cmmd, mean
from tasks.evaluate.judges import JUDGES
from tasks.evaluate.memorization import FEATURES as COPIES
from tasks.evaluate.memorization import PIXELS
from tasks.evaluate.metrics import (
    CLIP_SCORE,
    CMMD,
    most_rounds,
    prompt_numbers,
    prompt_rounds,
    sets_of_metric,
)
from tasks.publish.gate_power import GAINS, HARMLESS, PRIORS, Spread
from tasks.publish.promotion_gate import Rule, judge, outcome, parse_rule

DRAWS = 1000
#: Intervals have the resamples' variance alone, so fewer than a recipe's are enough.
RESAMPLES = 300
SEEDS = 4  # of the bootstrap: its weights are drawn once for each
HELD_OUT = 40  # pictures: 5% of the 813 of sdxl's data set
BORDERLINE = 1.0
BAD = 2.0  # lost, as a share of what a rule allows

_ASSUMED = Spread(29.0, 0.5, 1.8, 1.0)
#: CLIP scores: those that a warning before a run assumes, and others.
SPREADS = {
    "Stable Diffusion 1.5": PRIORS[CLIP_SCORE],
    "the same, pictures of two models unlike": replace(PRIORS[CLIP_SCORE], models=2.0 * 2**0.5),
    "one caption's pictures": _ASSUMED,
    "the same, prompts that differ by 3": replace(_ASSUMED, prompts=3.0),
    "the same, a loss that differs by 1": replace(_ASSUMED, lost=1.0),
    "the demo": Spread(65.4, 1.8, 1.5, 1.3, 0.7),
}
#: Shares of pictures: of copies of training pictures, and of what the digits' judges accept.
SHARES = (COPIES, PIXELS, *JUDGES["digits"].judges)
#: Features of CMMD: their length, and the lengths of their parts beside a common one of 1.
FEATURES = 64
STYLE = 0.4
PROMPT = 0.35
PICTURE = 0.35
MODEL = 0.2


class Decision(NamedTuple):
    """The outcome of a rule, and the rounds of pictures that it took."""

    outcome: str  # passed | failed | undecided
    rounds: int


def decisions(
    recipe: Recipe, rule: Rule, lost: float, draws: int, scores: Spread | None = None
) -> Iterator[Decision]:
    """The gate's decision on each of simulated models, with looks as `evaluate.max_pictures` says.

    Args:
        lost: HARMLESS, BORDERLINE or BAD.
        scores: of the rule's metric; None: its prior.
    """
    rounds = most_rounds(recipe.evaluate)
    prompts = _prompts(recipe, rule, rounds)
    looks = rounds if prompts else 1
    numbers = np.array(prompts or range(HELD_OUT))
    for draw in range(draws):
        rng = np.random.default_rng((draw, round(100 * lost)))
        if rule.metric == CMMD:
            models, reference = _features(rng, rule, lost, numbers)
        elif rule.metric.partition("/")[0] in SHARES:
            models, reference = _shares(rng, rule, lost, len(numbers)), None
        else:
            prior = PRIORS[rule.metric.partition("/")[0]]
            models, reference = _scores(rng, rule, lost, scores or prior, numbers), None
        for look in range(1, 1 + looks):
            size = len(numbers) * look // looks
            used = Resampling(RESAMPLES, draw % SEEDS, prompts and prompts[:size])
            measured = {
                name: {rule.metric: _estimate(values[:size], reference, used)}
                for name, values in zip(("tuned", str(rule.model)), models, strict=True)
            }
            number = 0 if recipe.evaluate.max_pictures is None else look
            (verdict,) = judge([rule.text], measured, champion=True, look=number)
            if not verdict.undecided:
                break
        yield Decision(outcome(verdict), look)


def share(made: Sequence[Decision]) -> float:
    """The share of decisions that passed."""
    return float(np.mean([decision.outcome == "passed" for decision in made]))


def rules_of(recipe: Recipe) -> list[Rule]:
    """The rules of a recipe's gate."""
    return [*map(parse_rule, recipe.publish.gate)]


def _prompts(recipe: Recipe, rule: Rule, rounds: int) -> Prompts | None:
    """The numbers of the prompts of a rule's pictures, by rounds; None of a held-out loss."""
    chosen = sets_of_metric(rule.metric, recipe.evaluate)
    drawn = prompt_rounds(recipe.evaluate, rounds)
    return prompt_numbers(*({n: sets[n] for n in chosen} for sets in drawn)) if chosen else None


def _estimate(values: NDArray[Any], reference: Float64 | None, used: Resampling) -> Estimate:
    if reference is not None:
        return cmmd(values, reference, used)
    return distances.share(values, used) if values.dtype == bool else mean(values, used)


def _scores(
    rng: np.random.Generator, rule: Rule, lost: float, spread: Spread, numbers: NDArray[np.int64]
) -> tuple[Float64, Float64]:
    """Scores of the pictures of the tuned and of the other model."""
    distinct = numbers.max() + 1
    change = lost * (rule.factor * spread.level + rule.offset - spread.level)
    if change == 0.0 and lost < BORDERLINE:
        gain = GAINS[rule.metric.partition("/")[0]] * spread.level
        change = gain if rule.op.startswith(">") else -gain
    other = spread.level + rng.normal(0, spread.prompts, distinct)[numbers]
    other += rng.normal(0, spread.pictures, len(numbers))
    tuned = other + change + rng.normal(0, spread.lost, distinct)[numbers]
    tuned += rng.normal(0, spread.models, len(numbers))
    return tuned, other


def _shares(
    rng: np.random.Generator, rule: Rule, lost: float, count: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Whether each picture is accepted, or a copy: 0 or 1, of the tuned and of the other model."""
    assert rule.number is not None
    best = 1.0 if rule.op.startswith(">") else 0.0
    chance = best + lost * (rule.number - best)
    pictures = rng.random(count) < chance
    return pictures, pictures


def _features(
    rng: np.random.Generator, rule: Rule, lost: float, numbers: NDArray[np.int64]
) -> tuple[tuple[Float64, Float64], Float64]:
    """Features of the tuned and the other model's pictures, and of held-out ones.

    A harmless model halves the base's distance of styles, and the champion has done so.
    """

    def vectors(length: float, count: int) -> Float64:
        return rng.normal(0, length / FEATURES**0.5, (count, FEATURES))

    common, style = np.eye(FEATURES)[:2]
    held_out = common + vectors(PROMPT, HELD_OUT) + vectors(PICTURE, HELD_OUT)
    seen = common + vectors(PROMPT, numbers.max() + 1)[numbers] + vectors(PICTURE, len(numbers))
    other = STYLE if rule.model == "base" else STYLE / 2
    way = STYLE if lost >= BORDERLINE else STYLE / 2
    if rule.factor > 1.0:  # a distance of pictures is the square of that of features
        way = other * (1.0 + lost * (rule.factor - 1.0)) ** 0.5
    tuned = seen + way * style + vectors(MODEL, len(numbers))
    return (tuned, seen + other * style + vectors(MODEL, len(numbers))), held_out


def figures(recipe: Recipe, rule: Rule, draws: int) -> dict[str, float]:
    """Shares that pass and rounds on average, of the least favourable spread of each."""
    is_score = rule.metric.startswith(CLIP_SCORE)
    spreads: Mapping[str, Spread | None] = SPREADS if is_score else {"as assumed": None}
    made = {
        lost: [[*decisions(recipe, rule, lost, draws, each)] for each in spreads.values()]
        for lost in (HARMLESS, BORDERLINE, BAD)
    }
    rounds = [np.mean([decision.rounds for decision in each]) for each in made[HARMLESS]]
    return {
        "harmless, least": min(map(share, made[HARMLESS])),
        "borderline, most": max(map(share, made[BORDERLINE])),
        "bad, most": max(map(share, made[BAD])),
        "rounds of a harmless one, most": float(max(rounds)),
    }


def main(arguments: Sequence[str]) -> int:
    """Simulate the gate of every shipped recipe."""
    parser = option_parser("gate_power", __doc__)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--recipes", nargs="+", default=recipe_names())
    options = parser.parse_args(arguments)
    alike: dict[tuple[object, ...], list[tuple[Recipe, Rule]]] = {}
    for recipe in map(load_recipe, options.recipes):
        for rule in rules_of(recipe):
            rounds = most_rounds(recipe.evaluate)
            simulated = (rule.text, rounds, _prompts(recipe, rule, rounds))
            alike.setdefault(simulated, []).append((recipe, rule))
    rows = []
    for same in alike.values():
        recipe, rule = same[0]
        name = f"{rule.text}: {', '.join(one.name for one, _ in same)}"
        log(name)
        rows.append(Row(name, figures=figures(recipe, rule, options.draws)))
    return finish("gate_power", rows, options, ("kilnworks", "numpy"), draws=options.draws)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
