"""How often the shipped gates let good and bad models pass.

`PYTHONPATH=tests .venv/bin/python -m simulated_gate` prints the shares.

Scores of pictures, held-out losses and features are simulated; the gate's own estimators and rules
judge them, at each look at a growing number of pictures. A harmless model lost a tenth of what a
rule allows, a harmful one all of it, a bad one twice as much. Where a rule demands a gain, the
harmless model has one and the others have none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.report import Row, log, publish, versions
from configs.load_recipe import load_recipe, recipe_names
from configs.settings.recipe import Recipe
from configs.settings.train_parts import HOLDOUT_LOSS
from tasks.evaluate.distances import Estimate, Float64, Prompts, Resampling, cmmd, mean
from tasks.evaluate.metrics import CMMD, most_rounds, prompt_numbers, prompt_rounds, sets_of_metric
from tasks.publish.promotion_gate import Rule, judge, outcome, parse_rule

DRAWS = 1000
SEEDS = 4  # of the bootstrap: its weights are drawn once for each
HELD_OUT = 40  # pictures: 5% of the 813 of sdxl's data set
HARMLESS = 0.1
HARMFUL = 1.0
BAD = 2.0  # lost, as a share of what a rule allows
GAIN = 0.02  # of the harmless model's held-out loss, where a rule allows no loss


@dataclass(frozen=True)
class Spread:
    """A score's mean and its standard deviations."""

    level: float
    prompts: float  # between prompts, alike in both models
    pictures: float  # between pictures of a prompt, alike in both models
    models: float  # between two models' pictures of the same noise
    lost: float = 0.0  # between prompts, of what the tuned model lost


CLIP_SCORE = Spread(29.0, 0.5, 1.8, 1.0)
SPREADS = {
    "as assumed": CLIP_SCORE,
    "prompts that differ by 3": replace(CLIP_SCORE, prompts=3.0),
    "models that differ by 2": replace(CLIP_SCORE, models=2.0),
    "a loss that differs by 1 between prompts": replace(CLIP_SCORE, lost=1.0),
    "as measured on the demo": Spread(65.4, 1.8, 1.5, 1.3, 0.7),
}
LOSS = Spread(1.0, 0.0, 0.4, 0.02)
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

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"


def decisions(
    recipe: Recipe, rule: Rule, lost: float, draws: int, scores: Spread = CLIP_SCORE
) -> Iterator[Decision]:
    """The gate's decision on each of simulated models, with looks as `evaluate.max_pictures` says.

    Args:
        lost: HARMLESS or HARMFUL.
        scores: of a CLIP score or a judge.
    """
    most = most_rounds(recipe.evaluate)
    prompts = _prompts(recipe, rule, most)
    simulate, estimate = (_features, cmmd) if rule.metric == CMMD else (_scores, _mean)
    for draw in range(draws):
        rng = np.random.default_rng((draw, round(100 * lost)))
        tuned, other, reference = simulate(
            rng, rule, lost, scores, np.array(prompts or range(HELD_OUT))
        )
        for look in range(1, 1 + (most if prompts else 1)):
            size = len(tuned) * look // (most if prompts else 1)
            used = Resampling(recipe.evaluate.bootstrap, draw % SEEDS, prompts and prompts[:size])
            estimates = (estimate(values[:size], reference, used) for values in (tuned, other))
            models = {
                name: {rule.metric: value}
                for name, value in zip(("tuned", str(rule.model)), estimates, strict=True)
            }
            number = look if most > 1 else 0
            (verdict,) = judge([rule.text], models, champion=True, look=number)
            if not verdict.undecided:
                break
        yield Decision(outcome(verdict), look)


def shares(
    recipe: Recipe, lost: float, draws: int, scores: Spread = CLIP_SCORE
) -> dict[str, float]:
    """Share of models that pass, by each rule with a level and by `all` of them together.

    `rounds` is the mean number of rounds until all rules are decided.
    """
    rules = [rule for rule in map(parse_rule, recipe.publish.gate) if rule.level is not None]
    made = {rule.text: [*decisions(recipe, rule, lost, draws, scores)] for rule in rules}
    passed = {text: [decision.passed for decision in each] for text, each in made.items()}
    rounds = np.max([[decision.rounds for decision in each] for each in made.values()], axis=0)
    together = np.all([*passed.values()], axis=0)
    means = {text: float(np.mean(one)) for text, one in passed.items()}
    return {**means, "all": float(together.mean()), "rounds": float(rounds.mean())}


def redistributed(recipe: Recipe, prompts: Mapping[str, int]) -> Recipe:
    """The recipe with other numbers of prompts in its sets, and as many pictures in all."""
    sets = {}
    for name, given in recipe.evaluate.prompts.items():
        count = prompts.get(name, len(given.prompts))
        pictures = len(given.prompts) * given.images_per_prompt
        texts = tuple(f"{name} {number}" for number in range(count))
        update = {"prompts": texts, "images_per_prompt": pictures // count}
        sets[name] = given.model_copy(update=update)
    evaluate = recipe.evaluate.model_copy(update={"prompts": sets})
    return recipe.model_copy(update={"evaluate": evaluate})


def _prompts(recipe: Recipe, rule: Rule, rounds: int) -> Prompts | None:
    """The numbers of the prompts of a rule's pictures, by rounds; None of a held-out loss."""
    chosen = sets_of_metric(rule.metric, recipe.evaluate)
    drawn = prompt_rounds(recipe.evaluate, rounds)
    return prompt_numbers(*({n: sets[n] for n in chosen} for sets in drawn)) if chosen else None


def _mean(values: Float64, reference: Float64, resampling: Resampling) -> Estimate:
    return mean(values, resampling)


def _scores(
    rng: np.random.Generator, rule: Rule, lost: float, scores: Spread, numbers: NDArray[np.int64]
) -> tuple[Float64, Float64, Float64]:
    """Scores of the pictures of the tuned and of the other model; they need no reference."""
    spread = LOSS if rule.metric == HOLDOUT_LOSS else scores
    size = len(numbers)
    distinct = numbers.max() + 1
    bound = rule.factor * spread.level + rule.offset
    change = lost * (bound - spread.level)
    if bound == spread.level and lost < HARMFUL:
        change = spread.level * (GAIN if rule.op.startswith(">") else -GAIN)
    other = spread.level + rng.normal(0, spread.prompts, distinct)[numbers]
    other += rng.normal(0, spread.pictures, size)
    tuned = other + change + rng.normal(0, spread.lost, distinct)[numbers]
    tuned += rng.normal(0, spread.models, size)
    return tuned, other, tuned


def _features(
    rng: np.random.Generator, rule: Rule, lost: float, scores: Spread, numbers: NDArray[np.int64]
) -> tuple[Float64, Float64, Float64]:
    """Features of the tuned and the other model's pictures, and of held-out ones.

    A harmless model halves the distance of styles.
    """

    def vectors(length: float, count: int) -> Float64:
        return rng.normal(0, length / FEATURES**0.5, (count, FEATURES))

    common = np.eye(FEATURES)[0]
    style = STYLE * np.eye(FEATURES)[1]
    held_out = common + vectors(PROMPT, HELD_OUT) + vectors(PICTURE, HELD_OUT)
    seen = common + vectors(PROMPT, numbers.max() + 1)[numbers] + vectors(PICTURE, len(numbers))
    way = 1.0 if lost >= HARMFUL else 0.5
    tuned = seen + way * style + vectors(MODEL, len(numbers))
    other = seen + style + vectors(MODEL, len(numbers))
    return tuned, other, held_out


def main(arguments: Sequence[str]) -> int:
    """Simulate the gate of every shipped recipe that has a rule with a level."""
    parser = argparse.ArgumentParser(prog="python -m simulated_gate", description=__doc__)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--recipes", nargs="+", default=recipe_names())
    parser.add_argument("--old", type=int, help="prompts of set `old`, with as many pictures")
    parser.add_argument("--new", type=int, help="prompts of set `new`, with as many pictures")
    parser.add_argument("--json", type=Path, help="file for the JSON line")
    options = parser.parse_args(arguments)
    sizes = {name: count for name in ("old", "new") if (count := getattr(options, name))}
    rows = []
    for name in options.recipes:
        recipe = redistributed(load_recipe(name), sizes)
        if all(parse_rule(text).level is None for text in recipe.publish.gate):
            continue
        for words, spread in SPREADS.items():
            log(f"{name}, {words}")
            figures = {
                f"{text}, {kind}": share
                for kind, lost in (("harmless", HARMLESS), ("harmful", HARMFUL), ("bad", BAD))
                for text, share in shares(recipe, lost, options.draws, spread).items()
            }
            rows.append(Row(f"{name}, {words}", figures=figures))
    publish("gate_power", rows, {"versions": versions(("kilnworks", "numpy"))}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
