"""The best trial of a sweep, refusals before work, and the table and curves of all trials."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from toy_recipes import base_of

from artifacts.store import KeyParts, Store
from configs.errors import Failed, Refused
from configs.load_recipe import load_recipe
from configs.settings.recipe import Sweep
from tasks import compare_sweep_trials
from tasks.compare_sweep_trials import (
    check_comparable,
    check_metric,
    choose_best,
    read_curve,
    terminal_lines,
    tuned_metrics,
)
from tasks.panels import Chart, Table, to_markdown


def trial(rate: float, value: float | None, curve: Any = ()) -> dict[str, Any]:
    """The outcome of a trial with a holdout loss; None: it failed."""
    outcome = {"label": f"learning_rate={rate}", "settings": {"train.learning_rate": rate}}
    if value is None:
        return outcome | {"status": "failed", "error": "diverged", "metrics": {}, "curve": []}
    metric = {"value": value, "ci": [value - 0.1, value + 0.1], "n": 9}
    metrics = {"holdout_loss": metric}
    return outcome | {"status": "measured", "error": None, "metrics": metrics, "curve": curve}


FALLS = [(n, 1.0 / n) for n in range(1, 41)]
TRIALS = [trial(1e-4, 0.3, FALLS), trial(9.0, None), trial(1e-3, 0.2, FALLS[:20])]


def test_the_best_trial_leads_in_the_metric_and_a_failed_one_never_does() -> None:
    assert choose_best(TRIALS, Sweep()) == 2
    assert choose_best(TRIALS, Sweep(mode="max")) == 0
    assert choose_best([trial(1.0, 0.5), trial(2.0, 0.5)], Sweep()) == 0
    assert choose_best(TRIALS[1:2], Sweep()) is None


@pytest.mark.parametrize(
    ("metric", "best"),
    [
        *[(name, "min") for name in ("holdout_loss/level1", "cmmd", "fd", "kid", "memorized")],
        *[(name, "max") for name in ("clip_score", "digit/new", "precision", "recall")],
    ],
)
def test_a_score_is_maximized_and_a_loss_or_distance_minimized(metric: str, best: str) -> None:
    trials = [trial(1.0, value) for value in (0.1, 0.9)]
    for one in trials:
        one["metrics"] = {metric: one["metrics"]["holdout_loss"]}
    assert choose_best(trials, Sweep(metric=metric)) == ["min", "max"].index(best)
    assert choose_best(trials, Sweep(metric=metric, mode="max")) == 1


def test_a_trial_without_the_metric_of_the_sweep_has_failed() -> None:
    metrics = {"holdout_loss": {"base": 2, "tuned": 1}}
    assert tuned_metrics(metrics, Sweep()) == {"holdout_loss": 1}
    with pytest.raises(Failed, match="cmmd was not measured"):
        tuned_metrics(metrics, Sweep(metric="cmmd"))


def test_the_terminal_has_a_row_and_a_curve_per_trial_the_best_first() -> None:
    head, *lines = terminal_lines(TRIALS, Sweep().model_dump())
    assert head.split() == ["trial", "train.learning_rate", "holdout_loss", "loss", "outcome"]
    assert [line.split()[0] for line in lines] == ["3", "1", "2"]
    assert [line.split()[-1] for line in lines] == ["best", "measured", "diverged"]
    assert "0.2 [0.1, 0.3]" in lines[0]
    assert lines[0].split()[-2][0] == "█" and lines[1].split()[-2][-1] == "▁"


def test_a_curve_may_have_values_that_are_not_finite() -> None:
    trials = [trial(1e-4, 0.3, [(1, 0.5), (2, math.inf), (3, 1.5)])]
    _, line = terminal_lines(trials, Sweep().model_dump())
    assert line.split()[-2] == "▁█"


def test_the_page_has_all_trials_curves_and_metrics() -> None:
    _, table, chart, metrics = compare_sweep_trials.show(TRIALS, Sweep(), {"trials": 3})
    assert isinstance(table, Table) and len(table.rows) == 3
    assert isinstance(chart, Chart)
    drawn = r'points="([^"]+)" style="[^"]*stroke-width: (?:3|1.6)'
    best, other = re.findall(drawn, chart.svg)[::2]
    assert len(best.split()) == 20 and len(other.split()) == 40
    assert isinstance(metrics, Table)
    assert list(metrics.rows[0]) == ["metric", "learning_rate=0.001", "learning_rate=0.0001"]
    assert "holdout" in to_markdown("digits: sweep", [table, chart, metrics])


def test_all_failed_trials_have_a_page() -> None:
    assert "none" in to_markdown("x", compare_sweep_trials.show(TRIALS[1:2], Sweep(), {}))


def test_the_curve_is_the_held_out_loss_or_else_the_mean_of_the_loss(tmp_path: Path) -> None:
    def trained(name: str, every: int) -> Any:
        lines = [{"step": n, "loss": 1.0} for n in range(1, 201)]
        for line in lines[every - 1 :: every] if every else []:
            line["validation_loss"] = 0.5
        store = Store(str(tmp_path))
        draft = store.draft(KeyParts("train", 1, {}, {"name": name}))
        draft.write("history.jsonl", "\n".join(map(json.dumps, lines)).encode())
        return draft.commit({}, {})

    assert read_curve(trained("held out", 50)) == [(n, 0.5) for n in (50, 100, 150, 200)]
    curve = read_curve(trained("training", 0))
    assert 40 <= len(curve) <= compare_sweep_trials.POINTS and curve[-1][0] == 200
    assert all(value == pytest.approx(1) for _, value in curve)


def test_a_metric_that_is_not_measured_is_refused() -> None:
    check_metric(load_recipe("digits"))
    with pytest.raises(Refused, match=r"sweep\.metric: holdout_los .*did you mean holdout_loss"):
        check_metric(load_recipe("digits", {"sweep.metric": "holdout_los"}))
    with pytest.raises(Refused, match="holdout_loss is not measured"):
        check_metric(load_recipe("digits"), held_out=0)


@pytest.mark.parametrize(
    "changed", [{"train.prediction_type": "epsilon"}, {"train.noise_offset": 0.1}]
)
def test_held_out_losses_of_another_definition_are_not_compared(changed: dict[str, Any]) -> None:
    def check(metric: str, changed: dict[str, Any]) -> None:
        given = {"sweep.metric": metric}
        recipes = [load_recipe("digits", given | more) for more in ({}, changed)]
        check_comparable(recipes, base_of(recipes[0]))

    check("holdout_loss", {"train.learning_rate": 1.0})
    check("cmmd", changed)
    with pytest.raises(Refused, match=r"holdout_loss/level1 of trials .* is not comparable"):
        check("holdout_loss/level1", changed)
